// Room to work in, which a thread keeps from call to call.
//
// A function takes arrays from it and gives all of them back at once when its `Scope` ends. Nothing is freed before the
// thread ends, so that a call allocates only where it needs more than any call before. Arrays come uninitialised.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "views.h"

namespace prophet {

class Workspace {
   public:
    Workspace() = default;
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

    Ints ints(Int size) { return {take<Int>(size), size}; }
    Floats floats(Int size) { return {take<double>(size), size}; }
    IntGrid ints(Int rows, Int columns) { return {take<Int>(rows * columns), rows, columns}; }
    FloatGrid floats(Int rows, Int columns) { return {take<double>(rows * columns), rows, columns}; }
    template <typename T>
    Span<T> array(Int size) {
        return {take<T>(size), size};
    }

    // Bytes held, for the test that calls of one size allocate once.
    std::size_t held_bytes() const {
        std::size_t bytes = 0;
        for (const Chunk& chunk : chunks_) bytes += chunk.bytes;
        return bytes;
    }

   private:
    friend class Scope;
    static constexpr std::size_t ALIGNMENT = 64;  // a cache line
    static constexpr std::size_t FIRST_BYTES = std::size_t{1} << 16;

    struct Chunk {
        std::unique_ptr<std::byte[]> data;
        std::size_t bytes = 0;
    };

    template <typename T>
    T* take(Int size) {
        return reinterpret_cast<T*>(take_bytes(static_cast<std::size_t>(size) * sizeof(T)));
    }
    std::byte* take_bytes(std::size_t bytes) {
        bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        // The rest of a chunk, and later ones that are too small, serve smaller arrays another time.
        for (; chunk_ < chunks_.size() && used_ + bytes > chunks_[chunk_].bytes; chunk_++) used_ = 0;
        if (chunk_ == chunks_.size()) {
            std::size_t size = std::max(bytes, chunks_.empty() ? FIRST_BYTES : 2 * chunks_.back().bytes);
            chunks_.push_back({std::unique_ptr<std::byte[]>(new std::byte[size]), size});
        }
        used_ += bytes;
        return chunks_[chunk_].data.get() + used_ - bytes;
    }

    std::vector<Chunk> chunks_;  // arrays stay where they are while it grows
    std::size_t chunk_ = 0;      // the one in use
    std::size_t used_ = 0;       // bytes of it
};

// Gives back, at its end, what was taken from a workspace since its beginning.
class Scope {
   public:
    explicit Scope(Workspace& room) : room_(room), chunk_(room.chunk_), used_(room.used_) {}
    ~Scope() {
        room_.chunk_ = chunk_;
        room_.used_ = used_;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Workspace& room_;
    std::size_t chunk_;
    std::size_t used_;
};

// The calling thread's own: the split and the plan of one rank overlap, and many ranks may live in one process.
inline Workspace& thread_workspace() {
    thread_local Workspace room;
    return room;
}

}  // namespace prophet
