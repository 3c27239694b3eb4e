// What the core counts with, and views of arrays that somebody else owns: a pointer and its sizes, passed by value.
//
// With PROPHET_CHECKED defined every index is checked; the tests with sanitizers build that way, since a sanitizer does
// not see an array end within a workspace.
#pragma once

#include <cfloat>
#include <cstdint>
#include <stdexcept>

#ifdef __FAST_MATH__
#error "the planner's core must not be compiled with -ffast-math or -Ofast: ranks would plan differently"
#endif
#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0
#error "the planner's core needs a processor that rounds every double operation to a double (not x87)"
#endif

namespace prophet {

using Int = std::int64_t;

// Becomes a `prophet.errors.SpecError`.
struct Refused : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void require(bool holds, const char* expected) {
    if (!holds) throw Refused(expected);
}

inline void check_index([[maybe_unused]] Int index, [[maybe_unused]] Int size) {
#ifdef PROPHET_CHECKED
    if (index < 0 || index >= size) throw std::out_of_range("index outside an array of the planner's core");
#endif
}

template <typename T>
struct Span {
    T* data = nullptr;
    Int size = 0;

    Span() = default;
    Span(T* data, Int size) : data(data), size(size) {}
    template <typename U>  // of writable elements to read-only ones
    Span(Span<U> other) : data(other.data), size(other.size) {}

    T& operator[](Int i) const {
        check_index(i, size);
        return data[i];
    }
    T* begin() const { return data; }
    T* end() const { return data + size; }

    Span part(Int first, Int count) const {
        if (count > 0) check_index(first + count - 1, size);
        return {data + first, count};
    }
    void fill(T value) const {
        for (Int i = 0; i < size; i++) data[i] = value;
    }
    template <typename U>
    void copy_from(Span<U> other) const {
        for (Int i = 0; i < size; i++) data[i] = other[i];
    }
};

// Rows of equal length, one after the other.
template <typename T>
struct Grid {
    T* data = nullptr;
    Int rows = 0;
    Int columns = 0;

    Grid() = default;
    Grid(T* data, Int rows, Int columns) : data(data), rows(rows), columns(columns) {}
    template <typename U>
    Grid(Grid<U> other) : data(other.data), rows(other.rows), columns(other.columns) {}

    Span<T> operator[](Int row) const {
        check_index(row, rows);
        return {data + row * columns, columns};
    }
    Span<T> flat() const { return {data, rows * columns}; }
};

using Ints = Span<Int>;
using Floats = Span<double>;
using ConstInts = Span<const Int>;
using ConstFloats = Span<const double>;
using IntGrid = Grid<Int>;
using FloatGrid = Grid<double>;
using ConstIntGrid = Grid<const Int>;
using ConstFloatGrid = Grid<const double>;
using ConstBoolGrid = Grid<const bool>;

}  // namespace prophet
