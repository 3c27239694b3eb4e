// Entries of the partition of layers over pipeline stages.
#include "arguments.h"
#include "partition.h"

namespace prophet {

namespace {

Pipeline checked(const IntArray& units, const IntArray& state, const IntArray& active, const IntArray& held,
                 const FloatArray& speed, const IntArray& capacity, const FloatArray& links) {
    Pipeline p{view(units), view(state), view(active), view(held), view(speed), view(capacity), view(links)};
    require(p.units.size > 0, "units must be [L + 1]");
    require(p.state.size == p.units.size && p.active.size == p.units.size,
            "state and active must be [L + 1], with units [L + 1]");
    require(p.held.size == p.stages() && p.capacity.size == p.stages() && p.links.size == p.stages(),
            "held, capacity and links must be [P], with speed [P]");
    require(p.stages() > 0 && p.stages() <= p.layers(), "every stage needs at least one layer");
    for (double s : p.speed) require(s > 0.0, "speed must be positive");
    for (double l : p.links) require(l >= 0.0, "links must not be negative");
    return p;
}

double bottleneck_entry(const IntArray& units, const IntArray& state, const IntArray& active, const IntArray& held,
                        const FloatArray& speed, const IntArray& capacity, const FloatArray& links) {
    Pipeline pipeline = checked(units, state, active, held, speed, capacity, links);
    nb::gil_scoped_release unlocked;
    return minimal_bottleneck(pipeline, thread_workspace());
}

bool boundaries_entry(const IntArray& units, const IntArray& state, const IntArray& active, const IntArray& held,
                      const FloatArray& speed, const IntArray& capacity, const FloatArray& links, double beta,
                      double square_weight, const FloatArray2D& penalty, const OutInts& out_boundaries) {
    Pipeline pipeline = checked(units, state, active, held, speed, capacity, links);
    ConstFloatGrid costs = view(penalty);
    require(costs.rows == pipeline.stages() && costs.columns == pipeline.units.size, "penalty must be [P, L + 1]");
    require(view(out_boundaries).size == pipeline.stages() + 1, "out_boundaries must be [P + 1]");
    nb::gil_scoped_release unlocked;
    return best_boundaries(beta, pipeline, square_weight, costs, view(out_boundaries), thread_workspace());
}

}  // namespace

void bind_partition(nb::module_& module) {
    module.def("minimal_bottleneck", bottleneck_entry, Arg("units"), Arg("state"), Arg("active"), Arg("held"),
               Arg("speed"), Arg("capacity"), Arg("links"));
    module.def("best_boundaries", boundaries_entry, Arg("units"), Arg("state"), Arg("active"), Arg("held"),
               Arg("speed"), Arg("capacity"), Arg("links"), nb::arg("beta"), nb::arg("square_weight"), Arg("penalty"),
               Arg("out_boundaries"));
}

}  // namespace prophet
