// The module `prophet.planner.core._core`. Its types are in _core.pyi.
#include "arguments.h"
#include "workspace.h"

namespace prophet {

void bind_partition(nb::module_& module);
void bind_plan(nb::module_& module);
void bind_split(nb::module_& module);

static void raise_spec_error(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const Refused& refused) {
        nb::object error = nb::module_::import_("prophet.errors").attr("SpecError");
        PyErr_SetString(error.ptr(), refused.what());
    }
}

NB_MODULE(_core, module) {
    nb::register_exception_translator(raise_spec_error);
    nb::set_leak_warnings(false);  // a program that ends while a thread plans is no leak
    module.attr("SOURCES") = PROPHET_SOURCES;
    module.def("held_bytes", [] { return thread_workspace().held_bytes(); });
    bind_partition(module);
    bind_plan(module);
    bind_split(module);
}

}  // namespace prophet
