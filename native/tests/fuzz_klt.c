/* fuzz_klt.c - hostile streams for the transform coder of every instruction set: ctxreuse_fuzz_klt INPUTS [SEED].
 *
 * The test suite gives it 10,000; fuzz_rans.c says how to build it for ten million.
 */
#include "klt.h"

uint64_t random_state = 0x9e3779b97f4a7c15ull;

int main(int count, char **arguments) {
    const size_t inputs = count > 1 ? strtoull(arguments[1], NULL, 10) : 0;
    if (inputs == 0) {
        fprintf(stderr, "usage: %s INPUTS [SEED]\n", arguments[0]);
        return 2;
    }
    if (count > 2) random_state ^= strtoull(arguments[2], NULL, 10) * 0x2545f4914f6cdd1dull;
    const size_t decoded = fuzz_klt(inputs);
    printf("%zu inputs, %zu decoded to other rows, the rest refused\n", inputs, decoded);
    return 0;
}
