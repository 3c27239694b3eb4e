// How arrays come from Python: C-contiguous, in the processor's memory, of exactly this type and number of dimensions.
//
// `Arg(...)` declares an argument that is never converted: a wrong array is a TypeError, not a copy. Sizes that have to
// agree are for the entries to check with `require`, before they release the interpreter lock.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <initializer_list>
#include <stdexcept>
#include <type_traits>

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

// A new array for Python.
template <typename T, typename Shape>
nb::object new_array(const T* data, Int size, std::initializer_list<std::size_t> shape) {
    T* copy = new T[static_cast<std::size_t>(size)];
    nb::capsule owner(copy, [](void* array) noexcept { delete[] static_cast<T*>(array); });
    for (Int i = 0; i < size; i++) copy[i] = data[i];
    return nb::cast(nb::ndarray<nb::numpy, T, Shape, nb::c_contig>(copy, shape, owner));
}

template <typename T>
nb::object new_array(Span<T> values) {
    using Value = std::remove_const_t<T>;
    return new_array<Value, nb::ndim<1>>(values.data, values.size, {static_cast<std::size_t>(values.size)});
}

// Becomes a `prophet.errors.SpecError`.
struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void require(bool holds, const char* expected) {
    if (!holds) throw Refused(expected);
}

inline auto Arg(const char* name) { return nb::arg(name).noconvert(); }

}  // namespace prophet
