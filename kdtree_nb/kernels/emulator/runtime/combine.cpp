// combine.cpp: what the lanes of a warp get from a meeting.
#include "block.h"

#pragma GCC visibility push(hidden)

namespace emulator {

namespace {

template <class Function> void for_each(unsigned lanes, Function function)
{
    for (unsigned rest = lanes; rest; rest &= rest - 1)
        function(lowest(rest));
}

template <class T, class Operation> void reduce(Warp& warp, unsigned lanes, Operation operation)
{
    T total = T(warp.operand[lowest(lanes)]);
    for_each(lanes & (lanes - 1), [&](int lane) { total = operation(total, T(warp.operand[lane])); });
    for_each(lanes, [&](int lane) { warp.result[lane] = unsigned(total); });
}

}  // namespace

void whole_warp(Warp& warp, unsigned lanes)
{
    const Site& site = *warp.site[lowest(lanes)];
    if (lanes != 0xffffffffu)
        fail("%s at %s:%d takes a whole warp, these lanes are here: 0x%08x", site.function, site.file(), site.line,
             lanes);
}

void combine_nothing(Warp&, unsigned) {}

void combine_shuffle(Warp& warp, unsigned lanes)
{
    for_each(lanes, [&](int lane) {
        const int source = warp.source[lane];
        if (!(lanes & bit(source))) {
            const Site& site = *warp.site[lane];
            fail("%s at %s:%d: lane %d reads lane %d, which %s", site.function, site.file(), site.line, lane, source,
                 warp.mask[lane] & bit(source) ? "has returned or was never there" : "its mask does not name");
        }
        warp.result[lane] = warp.operand[source];
    });
}

void combine_ballot(Warp& warp, unsigned lanes)
{
    unsigned votes = 0;
    for_each(lanes, [&](int lane) { votes |= unsigned(warp.operand[lane]) ? bit(lane) : 0; });
    for_each(lanes, [&](int lane) { warp.result[lane] = votes; });
}

void combine_match_any(Warp& warp, unsigned lanes)
{
    for_each(lanes, [&](int lane) {
        unsigned alike = 0;
        for_each(lanes, [&](int other) { alike |= warp.operand[other] == warp.operand[lane] ? bit(other) : 0; });
        warp.result[lane] = alike;
    });
}

#define EMULATOR_COMBINE(name, T, expression)                             \
    void combine_##name(Warp& warp, unsigned lanes)                       \
    {                                                                     \
        reduce<T>(warp, lanes, [](T a, T b) -> T { return expression; }); \
    }
EMULATOR_COMBINE(add, unsigned, a + b)
EMULATOR_COMBINE(min, unsigned, a < b ? a : b)
EMULATOR_COMBINE(max, unsigned, a > b ? a : b)
EMULATOR_COMBINE(signed_min, int, a < b ? a : b)
EMULATOR_COMBINE(signed_max, int, a > b ? a : b)
EMULATOR_COMBINE(and, unsigned, a & b)
EMULATOR_COMBINE(or, unsigned, a | b)
EMULATOR_COMBINE(xor, unsigned, a ^ b)

}  // namespace emulator

#pragma GCC visibility pop
