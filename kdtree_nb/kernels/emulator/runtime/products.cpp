// products.cpp: wgmma, a warp's quarter of it. Products are taken when they are issued and appear with the wait for their
// group: until then the registers of d hold NaN, and what was read of shared memory has to stay as it is.
#include "block.h"

#include <stdlib.h>
#include <string.h>

#pragma GCC visibility push(hidden)

namespace emulator {

struct AsyncProducts {
    struct Result {
        float* to[LANES];
        float values[LANES][32];
        int count;  // of a lane's values
        int group;  // of the last product in it
    };
    struct Operand {
        unsigned long long descriptor;
        int first_row, rows;
        bool transposed;
        unsigned long long hash;  // of what it held
        Site site;
        int group;
    };
    Result* results;
    Operand* operands;
    int result_count, result_capacity, operand_count, operand_capacity;
    int groups;  // closed so far
};

namespace {

template <class T> T& append(T*& list, int& count, int& capacity)
{
    if (count == capacity) {
        capacity = capacity ? 2 * capacity : 8;
        void* larger = realloc(list, size_t(capacity) * sizeof(T));
        if (!larger)
            fail("no memory for wgmma");
        list = static_cast<T*>(larger);
    }
    return list[count++];
}

AsyncProducts& products_of(Warp& warp)
{
    if (!warp.products)
        warp.products = static_cast<AsyncProducts*>(calloc(1, sizeof(AsyncProducts)));
    if (!warp.products)
        fail("no memory for wgmma");
    return *warp.products;
}

unsigned field(unsigned long long descriptor, int first_bit) { return unsigned(descriptor >> first_bit & 0x3fff) << 4; }

constexpr int MOST_ROWS = 64;

// The numbers of an operand as they lie: of each row 16 along the sum; transposed, of each of these 16 all rows.
void read_bits(const AsyncProducts::Operand& operand, unsigned short* to)
{
    const unsigned start = field(operand.descriptor, 0), next_rows = field(operand.descriptor, 32);
    const Grid& grid = *self().grid;
    const auto read_8 = [&](unsigned at) {
        at ^= (at >> 7 & 7) << 4;
        if (at + 16 > unsigned(grid.launch.shared_bytes))
            fail("%s at %s:%d reads bytes %u to %u of dynamic shared memory, the block has %d", operand.site.function,
                 operand.site.file(), operand.site.line, at, at + 15, grid.launch.shared_bytes);
        memcpy(to, grid.dynamic_shared() + at, 16);
        to += 8;
    };
    if (operand.transposed)
        for (int i = 0; i < 16; ++i)
            for (int n = 0; n < operand.rows; n += 8)
                read_8(start + unsigned(i / 8) * next_rows + unsigned(i % 8 * 128 + n * 2));
    else
        for (int n = operand.first_row; n < operand.first_row + operand.rows; ++n)
            for (int i = 0; i < 16; i += 8)
                read_8(start + unsigned(n / 8) * next_rows + unsigned(n % 8 * 128 + i * 2));
}

unsigned long long hash_of(const unsigned short* bits, int rows)
{
    unsigned long long hash = 0;
    for (int i = 0; i < 16 * rows; i += 4) {
        unsigned long long four;
        memcpy(&four, bits + i, sizeof four);
        hash = (hash ^ four) * 0x9e3779b97f4a7c15;
        hash ^= hash >> 32;
    }
    return hash;
}

double widen(unsigned bits)
{
    const unsigned word = bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return double(value);
}

// An operand in shared memory, and a note of what it was.
void read_operand(AsyncProducts& products, unsigned long long descriptor, bool transposed, int first_row, int rows,
                  unsigned short* bits, const Site& site)
{
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7))
        fail("%s at %s:%d: descriptor 0x%016llx, only swizzles of 128 bytes are modelled", site.function, site.file(),
             site.line, descriptor);
    AsyncProducts::Operand& operand = append(products.operands, products.operand_count, products.operand_capacity);
    operand = {descriptor, first_row, rows, transposed, 0, site, products.groups};
    read_bits(operand, bits);
    operand.hash = hash_of(bits, rows);
}

// The registers of d that await their values, those of earlier products into them included.
AsyncProducts::Result& result_in(AsyncProducts& products, Warp& warp, int count)
{
    const auto operands = [&](int lane) { return reinterpret_cast<WgmmaOperands*>(size_t(warp.operand[lane])); };
    for (int i = 0; i < products.result_count; ++i)
        if (products.results[i].to[0] == operands(0)->d)
            return products.results[i];
    AsyncProducts::Result& result = append(products.results, products.result_count, products.result_capacity);
    result.count = count;
    for (int lane = 0; lane < LANES; ++lane) {
        result.to[lane] = operands(lane)->d;
        memcpy(result.values[lane], result.to[lane], size_t(count) * sizeof(float));
        memset(result.to[lane], 0xff, size_t(count) * sizeof(float));
    }
    return result;
}

}  // namespace

void combine_wgmma(Warp& warp, unsigned lanes)
{
    whole_warp(warp, lanes);
    const auto operands = [&](int lane) { return reinterpret_cast<WgmmaOperands*>(size_t(warp.operand[lane])); };
    const WgmmaOperands& first = *operands(0);
    const Site& site = *warp.site[0];
    for (int lane = 0; lane < LANES; ++lane)
        if (operands(lane)->a_descriptor != first.a_descriptor || operands(lane)->b_descriptor != first.b_descriptor ||
            operands(lane)->adds != first.adds)
            fail("%s at %s:%d: lane %d brings other operands than lane 0", site.function, site.file(), site.line, lane);

    AsyncProducts& products = products_of(warp);
    double a[16][16], b[16][MOST_ROWS];  // [row, i], [i, column]
    unsigned short bits[16 * MOST_ROWS];
    if (first.a) {
        for (int lane = 0; lane < LANES; ++lane)
            for (int r = 0; r < 4; ++r)
                for (int i = 0; i < 2; ++i)
                    a[lane / 4 + 8 * (r & 1)][2 * (lane % 4) + 8 * (r >> 1) + i] =
                        widen(operands(lane)->a[r] >> 16 * i & 0xffff);
    } else {
        read_operand(products, first.a_descriptor, false, warp.index % 4 * 16, 16, bits, site);
        for (int row = 0; row < 16; ++row)
            for (int i = 0; i < 16; ++i)
                a[row][i] = widen(bits[16 * row + i]);
    }
    read_operand(products, first.b_descriptor, first.b_transposed, 0, first.columns, bits, site);
    for (int i = 0; i < 16; ++i)
        for (int column = 0; column < first.columns; ++column)
            b[i][column] = widen(first.b_transposed ? bits[first.columns * i + column] : bits[16 * column + i]);

    AsyncProducts::Result& result = result_in(products, warp, first.columns / 2);
    result.group = products.groups;
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < first.columns; column += 8) {
            double sum[8] = {};
            for (int i = 0; i < 16; ++i)
                for (int c = 0; c < 8; ++c)
                    sum[c] += a[row][i] * b[i][column + c];
            for (int c = 0; c < 8; ++c) {
                float& value = result.values[row % 8 * 4 + c / 2][column / 2 + row / 8 * 2 + c % 2];
                value = float((first.adds ? double(value) : 0.0) + sum[c]);
            }
        }
}

void combine_wgmma_commit(Warp& warp, unsigned lanes)
{
    whole_warp(warp, lanes);
    ++products_of(warp).groups;
}

void combine_wgmma_wait(Warp& warp, unsigned lanes)
{
    whole_warp(warp, lanes);
    AsyncProducts& products = products_of(warp);
    const int under_way = products.groups - int(warp.operand[0]);  // and later groups
    int left = 0;
    for (int i = 0; i < products.operand_count; ++i) {
        const AsyncProducts::Operand& operand = products.operands[i];
        if (operand.group >= under_way) {
            products.operands[left++] = operand;
            continue;
        }
        unsigned short bits[16 * MOST_ROWS];
        read_bits(operand, bits);
        if (hash_of(bits, operand.rows) != operand.hash)
            fail("%s at %s:%d: what it reads in shared memory was changed before the wait", operand.site.function,
                 operand.site.file(), operand.site.line);
    }
    products.operand_count = left;
    left = 0;
    for (int i = 0; i < products.result_count; ++i) {
        const AsyncProducts::Result& result = products.results[i];
        if (result.group >= under_way) {
            if (left < i)
                products.results[left] = result;
            ++left;
            continue;
        }
        for (int lane = 0; lane < LANES; ++lane)
            memcpy(result.to[lane], result.values[lane], size_t(result.count) * sizeof(float));
    }
    products.result_count = left;
}

void products_forget(Warp& warp)
{
    if (warp.products)
        warp.products->result_count = warp.products->operand_count = warp.products->groups = 0;
}

unsigned shared_address(const void* shared)
{
    return unsigned(static_cast<const unsigned char*>(shared) - self().grid->dynamic_shared());
}

}  // namespace emulator

#pragma GCC visibility pop
