// What the core counts with. Every file includes it, so that no file is compiled in a way that rounds differently.
#pragma once

#include <cfloat>
#include <cstdint>

#ifdef __FAST_MATH__
#error "the planner's core must not be compiled with -ffast-math or -Ofast: ranks would plan differently"
#endif
#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0
#error "the planner's core needs a processor that rounds every double operation to a double (not x87)"
#endif

namespace prophet {

using Int = std::int64_t;

}  // namespace prophet
