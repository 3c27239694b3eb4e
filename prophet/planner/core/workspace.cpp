#include "workspace.h"

#include <algorithm>

namespace prophet {

void Workspace::next_chunk(std::size_t bytes) {
    // The rest of this chunk, and later ones that are too small, serve smaller arrays another time.
    std::size_t next = chunk_ < chunks_.size() ? chunk_ + 1 : chunk_;
    while (next < chunks_.size() && chunks_[next].bytes < bytes) next++;
    if (next == chunks_.size()) {
        std::size_t size = std::max(bytes, chunks_.empty() ? FIRST_BYTES : 2 * chunks_.back().bytes);
        chunks_.push_back({std::unique_ptr<std::byte[]>(new std::byte[size]), size});
    }
    chunk_ = next;
    used_ = 0;
}

std::size_t Workspace::held_bytes() const {
    std::size_t bytes = 0;
    for (const Chunk& chunk : chunks_) bytes += chunk.bytes;
    return bytes;
}

Workspace& thread_workspace() {
    thread_local Workspace room;
    return room;
}

}  // namespace prophet
