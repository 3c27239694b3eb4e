// The exact split token by token: which source's tokens of an expert go to which of its holders.
#pragma once

#include <algorithm>

#include "holders.h"
#include "problem.h"

namespace prophet {

// Tokens that go from `source` to `rank`.
struct Row {
    Int source;
    Int expert;
    Int rank;
    Int tokens;
};

// Columns of a load, gathered for a few experts at a time: a column by itself reads a cache line for every token.
class Columns {
   public:
    Columns(ConstIntGrid load_RE, ConstInts expert_M, Workspace& room)
        : load_RE_(load_RE), expert_M_(expert_M), column_(room.ints(TOGETHER, load_RE.rows)) {}

    // Tokens of expert j by rank; they may be written, for one use.
    Ints take(Int j) {
        if (j < first_ || j >= first_ + TOGETHER) {
            first_ = j;
            Int many = std::min(TOGETHER, expert_M_.size - j);
            for (Int r = 0; r < load_RE_.rows; r++) {
                ConstInts load_E = load_RE_[r];
                for (Int i = 0; i < many; i++) column_[i][r] = load_E[expert_M_[j + i]];
            }
        }
        return column_[j - first_];
    }

   private:
    static constexpr Int TOGETHER = 8;
    ConstIntGrid load_RE_;
    ConstInts expert_M_;
    IntGrid column_;
    Int first_ = -TOGETHER;
};

// Calls `sink(k, source, tokens)` for what every source sends to the holder of arc k, of expert j: local tokens stay,
// then sources meet holders of their own node in rank order, then all others do. `left` are the expert's tokens by
// rank, `want` has room for as many numbers as it has holders; both are used up.
template <typename Sink>
void match(const Holders& holders, Int j, ConstInts node_R, ConstInts tokens_A, Ints left, Ints want, Sink sink) {
    Int first = holders.start[j], last = holders.start[j + 1], rest = 0;
    for (Int k = first; k < last; k++) {
        Int d = holders.rank_A[k], local = std::min(left[d], tokens_A[k]);
        left[d] -= local;
        want[k - first] = tokens_A[k] - local;
        rest += want[k - first];
        if (local > 0) sink(k, d, local);
    }
    for (bool anywhere : {false, true}) {
        Int r = 0;
        for (Int k = first; rest > 0 && k < last;) {
            Int node = node_R[holders.rank_A[k]];
            while (r < node_R.size && (left[r] == 0 || (!anywhere && node_R[r] < node))) r++;
            if (want[k - first] == 0 || r == node_R.size || (!anywhere && node_R[r] > node)) {
                k++;
                continue;
            }
            Int part = std::min(left[r], want[k - first]);
            left[r] -= part;
            want[k - first] -= part;
            rest -= part;
            sink(k, r, part);
        }
    }
}

}  // namespace prophet
