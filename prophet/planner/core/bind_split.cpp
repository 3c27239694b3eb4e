// Entries of the split.
#include "arguments.h"
#include "workspace.h"

namespace prophet {

static void expert_totals_entry(const IntArray2D& load_RE, const OutInts& total_E) {
    require(total_E.shape(0) == load_RE.shape(1), "total_E must be [experts]");
    nb::gil_scoped_release unlocked;
    auto load = view(load_RE);
    auto total = view(total_E);
    total.fill(0);
    for (Int r = 0; r < load.rows; r++) {
        for (Int e = 0; e < load.columns; e++) total[e] += load[r][e];
    }
}

void bind_split(nb::module_& module) {
    module.def("expert_totals", expert_totals_entry, Arg("load_RE"), Arg("out_total_E"));
}

}  // namespace prophet
