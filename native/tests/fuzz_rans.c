/* fuzz_rans.c - hostile bytes for the decoder of every instruction set: ctxreuse_fuzz_rans INPUTS [SEED].
 *
 * The test suite gives it 40,000. Ten million under both sanitizers take minutes:
 *   cmake -S native -B fuzz -DCTXREUSE_PYTHON=OFF -DCTXREUSE_TESTS=ON -DCTXREUSE_SANITIZE=ON && cmake --build fuzz
 *   fuzz/tests/ctxreuse_fuzz_rans 10000000
 */
#include "rans.h"

uint64_t random_state = 0x9e3779b97f4a7c15ull;

int main(int count, char **arguments) {
    const size_t inputs = count > 1 ? strtoull(arguments[1], NULL, 10) : 0;
    if (inputs == 0) {
        fprintf(stderr, "usage: %s INPUTS [SEED]\n", arguments[0]);
        return 2;
    }
    if (count > 2) random_state ^= strtoull(arguments[2], NULL, 10) * 0x2545f4914f6cdd1dull;
    const size_t decoded = fuzz_rans(inputs);
    printf("%zu inputs, %zu decoded to other symbols, the rest refused\n", inputs, decoded);
    return 0;
}
