// How arrays come from Python: C-contiguous, in the processor's memory, of exactly this type and number of dimensions.
//
// `Arg(...)` declares an argument that is never converted: a wrong array is a TypeError, not a copy. Sizes that have to
// agree are for the entries to check with `require`, before they release the interpreter lock.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "views.h"

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
using OutInts2D = Array<Int, 2>;
using OutInts3D = Array<Int, 3>;
using OutFloats = Array<double, 1>;
using OutBools2D = Array<bool, 2>;

template <typename T>
Span<T> view(const Array<T, 1>& array) {
    return {array.data(), static_cast<Int>(array.shape(0))};
}

template <typename T>
Grid<T> view(const Array<T, 2>& array) {
    return {array.data(), static_cast<Int>(array.shape(0)), static_cast<Int>(array.shape(1))};
}

inline void require(bool holds, const char* expected) {
    if (!holds) throw nb::value_error(expected);
}

inline auto Arg(const char* name) { return nb::arg(name).noconvert(); }

}  // namespace prophet
