// shim.cpp - the scheduler of the fibres, and the kernels by name for who loads this as a library.
#include "shim.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <ucontext.h>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {
namespace {

constexpr size_t STACK = 64 << 10; // the address sanitizer clears its notes on it at every switch

struct Meeting {
    uint64_t generation = 0;
    unsigned arrived = 0;
    Kind kind = SYNC;
    Slot slots[2][32];
};

struct Fibre {
    ucontext_t context;
    std::unique_ptr<unsigned char[]> stack;
    const uint64_t *waits = nullptr; // parked until *waits differs from seen
    uint64_t seen = 0;
    bool done = false;
};

std::vector<Fibre> fibres;
std::vector<Meeting> warps;
Meeting everyone;
ucontext_t scheduler;
unsigned char *shared = nullptr;
void (*body)(const void *);
const void *body_argument;

[[noreturn]] void fail(const char *what) {
    std::fprintf(stderr, "shim: block %u, thread %u: %s\n", blockIdx.x, threadIdx.x, what);
    std::abort();
}

void wait_past(const uint64_t &generation, uint64_t seen) {
    Fibre &self = fibres[threadIdx.x];
    self.waits = &generation, self.seen = seen;
    swapcontext(&self.context, &scheduler);
    self.waits = nullptr;
}

void enter() {
    body(body_argument);
    fibres[threadIdx.x].done = true;
    setcontext(&scheduler);
}

void prepare(Fibre &fibre) {
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.get();
    fibre.context.uc_stack.ss_size = STACK;
    fibre.context.uc_link = nullptr;
    fibre.done = false, fibre.waits = nullptr;
    makecontext(&fibre.context, enter, 0);
}

void run_block(unsigned block) {
    for (Meeting &warp : warps) warp = {};
    everyone = {};
    for (Fibre &fibre : fibres) prepare(fibre);
    // In turns upwards and downwards: what holds in one order only is no order.
    for (unsigned left = block, turn = 0; left; turn++) {
        bool moved = false;
        for (unsigned i = 0; i < block; i++) {
            const unsigned t = turn % 2 ? block - 1 - i : i;
            Fibre &fibre = fibres[t];
            if (fibre.done || (fibre.waits && *fibre.waits == fibre.seen)) continue;
            moved = true, threadIdx = {t, 0, 0};
            swapcontext(&scheduler, &fibre.context);
            left -= fibre.done;
        }
        if (!moved) fail("every thread waits for one that will not come");
    }
}

} // namespace

unsigned char *shared_memory() { return shared; }

void block_barrier() {
    const uint64_t now = everyone.generation;
    if (++everyone.arrived == blockDim.x)
        everyone.arrived = 0, everyone.generation++;
    else
        wait_past(everyone.generation, now);
}

const Slot *meet(unsigned mask, Kind kind, const Slot &mine) {
    Meeting &warp = warps[threadIdx.x / 32];
    const uint64_t now = warp.generation;
    if (mask != ~0u) fail("a mask that is not full");
    if (warp.arrived && warp.kind != kind) fail("lanes of a warp meet in different collectives");
    warp.kind = kind;
    warp.slots[now % 2][threadIdx.x % 32] = mine;
    warp.arrived |= 1u << threadIdx.x % 32;
    if (warp.arrived == ~0u)
        warp.arrived = 0, warp.generation++;
    else
        wait_past(warp.generation, now);
    return warp.slots[now % 2];
}

void run(unsigned grid, unsigned block, size_t bytes, void (*thread)(const void *), const void *argument) {
    gridDim = {grid, 1, 1}, blockDim = {block, 1, 1};
    if (block % 32) fail("a block that is not made of whole warps");
    fibres.resize(block);
    warps.resize(block / 32);
    for (Fibre &fibre : fibres) fibre.stack.reset(new unsigned char[STACK]);
    body = thread, body_argument = argument;
    for (unsigned b = 0; b < grid; b++) {
        const std::unique_ptr<unsigned char[]> memory(new unsigned char[bytes]);
        std::memset(memory.get(), 0xa5, bytes);
        shared = memory.get(), blockIdx = {b, 0, 0};
        run_block(block);
    }
    fibres.clear(), warps.clear();
}

} // namespace shim

#include "../attend.cu"
#include "../klt_decode.cu"
#include "../klt_encode.cu"

// Runs a kernel to its end. Returns 0, or -1 for a name that is none. One thread at a time.
extern "C" int ctx_shim_launch(const char *name, unsigned grid, unsigned block, size_t bytes, void *const *arguments) {
#define KERNEL(kernel)                                                                                                 \
    if (std::strcmp(name, #kernel) == 0) return shim::launch(kernel, grid, block, bytes, arguments), 0;
    KERNEL(ctx_klt_decode)
    KERNEL(ctx_klt_quantise)
    KERNEL(ctx_klt_code)
    KERNEL(ctx_klt_pack)
    KERNEL(ctx_attend_64)
    KERNEL(ctx_attend_128)
    KERNEL(ctx_attend_256)
    KERNEL(ctx_attend_64_wide)
    KERNEL(ctx_attend_128_wide)
    KERNEL(ctx_attend_merge)
#undef KERNEL
    return -1;
}

// Bytes of a structure that the host lays out; 0 for a name that is none.
extern "C" size_t ctx_shim_size(const char *name) {
#define STRUCTURE(type)                                                                                                \
    if (std::strcmp(name, #type) == 0) return sizeof(type);
    STRUCTURE(RansTable)
    STRUCTURE(RansCode)
    STRUCTURE(Run)
    STRUCTURE(KltGroup)
    STRUCTURE(KltPlane)
    STRUCTURE(KltCell)
    STRUCTURE(AttendPlane)
    STRUCTURE(AttendRun)
    STRUCTURE(AttendItem)
#undef STRUCTURE
    return 0;
}
