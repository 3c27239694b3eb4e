// Changes of a placement, one at a time, each kept where the step gets shorter by it.
//
// A try starts from no replicas or from one expert everywhere, or takes up to three replicas away and may put one
// elsewhere; then it lets grow what is worth it. A few sweeps rule most tries out; the rest are compared by the splits that both placements would get, so that no
// try lengthens a step by the prediction.
#pragma once

#include "growth.h"
#include "levelling.h"

namespace prophet {

// Draws, the same on every machine; the upper bits are the better ones.
class Draws {
   public:
    explicit Draws(Int seed) : seed_(seed) {}
    Int seed() const { return seed_; }
    void mix(Int number) { seed_ = following(seed_ ^ number); }
    void advance() { seed_ = following(seed_); }
    // One of `many`, after advancing.
    Int one_of(Int many) {
        advance();
        return (seed_ >> 16) % many;
    }
    // Whether something happens that takes `cost` and may take `budget` in the mean.
    bool affords(double cost, double budget) {
        advance();
        return static_cast<double>(seed_ >> 8) * cost < budget * static_cast<double>(1 << 23);
    }

   private:
    static Int following(Int seed) {  // modulo 2^31; unsigned, since signed products must not overflow
        return static_cast<Int>((static_cast<std::uint64_t>(seed) * 1103515245u + 12345u) & 0x7FFFFFFFu);
    }
    Int seed_;
};

// Draws that differ where the counts do.
Draws draws_of(const Problem& problem);

constexpr Int CHOSEN = 64;   // experts that a try is about
constexpr Int TARGETS = 64;  // ranks that may get a replica in a try

enum class Change : Int { FRESH, EVERYWHERE, FEWER, OTHERS };

// Changes these replicas in one way, and writes what becomes of them where a step gets shorter by it; returns whether
// it does. A step with replicas may take `most_s`. A change to no replicas at first is always compared by its split.
bool try_once(const Problem& problem, ConstInts limit_R, Replicas& replicas, double most_s, double split_effort,
              Change kind, Draws draws, Workspace& room);

}  // namespace prophet
