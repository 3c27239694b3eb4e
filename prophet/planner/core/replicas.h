// A placement as a list: the replicas beside the homes, and the tokens on each where they are known.
#pragma once

#include "holders.h"

namespace prophet {

struct Replicas {
    Ints expert;
    Ints rank;
    Ints tokens;
    Int used = 0;

    Int most() const { return expert.size; }

    void copy_from(const Replicas& other) {
        used = other.used;
        for (Int i = 0; i < used; i++) {
            expert[i] = other.expert[i];
            rank[i] = other.rank[i];
            tokens[i] = other.tokens[i];
        }
    }

    void append(Int which, Int where, Int how_many = 0) {
        expert[used] = which;
        rank[used] = where;
        tokens[used] = how_many;
        used++;
    }
};

inline Holders index_replicas(const Replicas& replicas, ConstInts home_E, Workspace& room) {
    return index_replicas(replicas.expert.part(0, replicas.used), replicas.rank.part(0, replicas.used), home_E, room);
}

inline Replicas make_replicas(Int most, Workspace& room) { return {room.ints(most), room.ints(most), room.ints(most)}; }

}  // namespace prophet
