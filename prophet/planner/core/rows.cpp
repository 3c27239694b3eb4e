#include "rows.h"

#include <algorithm>

namespace prophet {

namespace {

// Matches one expert's sources with its holders.
struct Matching {
    Ints left;  // by source, tokens that have no holder yet
    Ints want;  // by holder, tokens that it is still to get
    Span<Row> rows;
    Int used = 0;

    void match(Int source, Int expert, Int rank, Int tokens) {
        left[source] -= tokens;
        want[rank] -= tokens;
        rows[used++] = {source, expert, rank, tokens};
    }
};

// Sources meet holders of their own node, both in rank order; returns the tokens that are left.
Int match_within_nodes(Matching& m, Int expert, Span<const Int> ranks, ConstInts node_R, Int rest) {
    Int r = 0;
    for (Int k = 0; rest > 0 && k < ranks.size;) {
        Int d = ranks[k];
        while (r < node_R.size && (node_R[r] < node_R[d] || m.left[r] == 0)) r++;
        if (m.want[d] == 0 || r == node_R.size || node_R[r] > node_R[d]) {
            k++;
            continue;
        }
        Int part = std::min(m.left[r], m.want[d]);
        m.match(r, expert, d, part);
        rest -= part;
    }
    return rest;
}

void match_across_nodes(Matching& m, Int expert, Span<const Int> ranks, Int rest) {
    Int r = 0;
    for (Int k = 0; rest > 0 && k < ranks.size;) {
        Int d = ranks[k];
        if (m.want[d] == 0) {
            k++;
            continue;
        }
        while (m.left[r] == 0) r++;
        Int part = std::min(m.left[r], m.want[d]);
        m.match(r, expert, d, part);
        rest -= part;
    }
}

}  // namespace

Span<Row> expand(ConstIntGrid load_RE, const Holders& holders, ConstInts node_R, ConstInts tokens_A, Workspace& room) {
    Int ranks = load_RE.rows, many = holders.experts();
    // Every row uses up a source or a holder, but for the local ones.
    Span<Row> rows = room.array<Row>(many * ranks + 2 * holders.arcs());
    Scope scope(room);
    Matching matching{room.ints(ranks), room.ints(ranks), rows};
    for (Int j = 0; j < many; j++) {
        Int e = holders.expert_M[j], first = holders.start[j], last = holders.start[j + 1], rest = 0;
        for (Int r = 0; r < ranks; r++) {
            matching.left[r] = load_RE[r][e];
            rest += matching.left[r];
        }
        for (Int k = first; k < last; k++) {
            Int d = holders.rank_A[k], local = std::min(matching.left[d], tokens_A[k]);
            matching.want[d] = tokens_A[k];
            if (local > 0) matching.match(d, e, d, local);
            rest -= local;
        }
        Span<const Int> holding = holders.rank_A.part(first, last - first);
        rest = match_within_nodes(matching, e, holding, node_R, rest);
        match_across_nodes(matching, e, holding, rest);
    }
    return {rows.data, matching.used};
}

}  // namespace prophet
