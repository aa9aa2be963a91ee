// shim.cpp - collectives of the CUDA shim, and threads that break CUDA's rules; the first letter of the argument says which.
#include "shim/shim.cpp"
#include <cstdio>

static unsigned ballots[64], swapped[64], sums[64], added;

static void sound() {
    unsigned *const memory = (unsigned *)shim::shared_memory();
    const unsigned t = threadIdx.x;
    ballots[t] = __ballot_sync(~0u, t % 3 == 0);
    swapped[t] = __shfl_xor_sync(~0u, t, 5);
    memory[t] = t;
    __syncthreads();
    for (unsigned i = 0; i < blockDim.x; i++) sums[t] += memory[i];
    atomicAdd(&added, 1u);
}
static void different() { if (threadIdx.x == 3) __syncwarp(); else __ballot_sync(~0u, 1); }
static void absent() { if (threadIdx.x != 3) __syncthreads(); }
static void partial() { __syncwarp(1u); }
static void beyond() { shim::shared_memory()[threadIdx.x + 1] = 1; }

static void start(void (*kernel)(), unsigned block, size_t bytes) {
    void *none[1];
    shim::launch(kernel, 2, block, bytes, none);
}

int main(int, char **arguments) {
    switch (arguments[1][0]) {
    case 's':
        start(sound, 64, 256);
        std::printf("%08x %08x %u %u %u %u\n", ballots[0], ballots[40], swapped[7], swapped[33], sums[63], added);
        break;
    case 'd': start(different, 32, 0); break;
    case 'a': start(absent, 32, 0); break;
    case 'p': start(partial, 32, 0); break;
    case 'b': start(beyond, 32, 32); break;
    case 'w': start(sound, 40, 256); break;
    }
}
