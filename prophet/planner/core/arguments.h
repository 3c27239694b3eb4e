// How arrays come from Python: C-contiguous, in the processor's memory, of exactly this type and number of dimensions.
//
// `Arg(...)` declares an argument that is never converted: a wrong array is a TypeError, not a copy. Sizes that have to
// agree are for the entries to check with `require`, before they release the interpreter lock.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <utility>

#include "problem.h"

namespace prophet {

namespace nb = nanobind;

template <typename T, int DIMENSIONS>
using Array = nb::ndarray<T, nb::ndim<DIMENSIONS>, nb::c_contig, nb::device::cpu>;

using IntArray = Array<const Int, 1>;
using IntArray2D = Array<const Int, 2>;
using FloatArray = Array<const double, 1>;
using FloatArray2D = Array<const double, 2>;
using BoolArray2D = Array<const bool, 2>;
using OutInts = Array<Int, 1>;
using OutInts3D = Array<Int, 3>;
using OutBools2D = Array<bool, 2>;

template <typename T>
Span<T> view(const Array<T, 1>& array) {
    return {array.data(), static_cast<Int>(array.shape(0))};
}

template <typename T>
Grid<T> view(const Array<T, 2>& array) {
    return {array.data(), static_cast<Int>(array.shape(0)), static_cast<Int>(array.shape(1))};
}

// An array for Python, of this shape, whose integers these are.
template <typename T>
nb::object new_array(std::unique_ptr<T[]> values, std::initializer_list<std::size_t> shape) {
    Int* data = reinterpret_cast<Int*>(values.get());
    nb::capsule owner(values.release(), [](void* array) noexcept { delete[] static_cast<T*>(array); });
    return nb::cast(nb::ndarray<nb::numpy, Int, nb::c_contig>(data, shape, owner));
}

inline nb::object new_array(Ints values) {
    const std::size_t size = static_cast<std::size_t>(values.size);
    std::unique_ptr<Int[]> copy(new Int[size]);
    std::copy(values.begin(), values.end(), copy.get());
    return new_array(std::move(copy), {size});
}

inline auto Arg(const char* name) { return nb::arg(name).noconvert(); }

// Raises SpecError in Python where sizes contradict one another or an index points outside.
Given checked(const IntArray2D& load_RE, const IntArray& home_E, const IntArray& node_R, const FloatArray& speed_R,
              const FloatArray& seconds_per_token_R, const FloatArray& figures);
// `holds_ER` has to be for these experts and ranks, and every home has to hold its expert.
void check_holders(const BoolArray2D& holds_ER, const Given& given);

}  // namespace prophet
