/* rans_words.h - byte permutes that put the next words of a stream into the lanes that want one, and back.
 *
 * A row for each set of 8 lanes. EXPAND[m] spreads the first words of 16 bytes over the lanes in m (0 elsewhere);
 * COMPRESS[m] moves the words of the lanes in m to the end of 16 bytes.
 */
#ifndef CTXREUSE_RANS_WORDS_H
#define CTXREUSE_RANS_WORDS_H

#include <stdint.h>

#define BIT(m, j) ((m) >> (j) & 1)
/* How many lanes of m lie below lane j. */
#define RANK(m, j)                                                                                              \
    ((0 < (j) && BIT(m, 0)) + (1 < (j) && BIT(m, 1)) + (2 < (j) && BIT(m, 2)) + (3 < (j) && BIT(m, 3)) +        \
     (4 < (j) && BIT(m, 4)) + (5 < (j) && BIT(m, 5)) + (6 < (j) && BIT(m, 6)) + (7 < (j) && BIT(m, 7)))
#define SPREAD(m, j) (BIT(m, j) ? 2 * RANK(m, j) : 128), (BIT(m, j) ? 2 * RANK(m, j) + 1 : 128)
#define EXPAND_ROW(m) \
    {SPREAD(m, 0), SPREAD(m, 1), SPREAD(m, 2), SPREAD(m, 3), SPREAD(m, 4), SPREAD(m, 5), SPREAD(m, 6), SPREAD(m, 7)}
/* Lane j, if it is the one for place p counted from the front of what stands at the end. */
#define IS(m, j, p) (BIT(m, j) && RANK(m, j) + 8 - RANK(m, 8) == (p) ? (j) + 1 : 0)
#define LANE(m, p) \
    (IS(m, 0, p) + IS(m, 1, p) + IS(m, 2, p) + IS(m, 3, p) + IS(m, 4, p) + IS(m, 5, p) + IS(m, 6, p) + IS(m, 7, p) - 1)
#define GATHER(m, p) (LANE(m, p) < 0 ? 128 : 2 * LANE(m, p)), (LANE(m, p) < 0 ? 128 : 2 * LANE(m, p) + 1)
#define COMPRESS_ROW(m) \
    {GATHER(m, 0), GATHER(m, 1), GATHER(m, 2), GATHER(m, 3), GATHER(m, 4), GATHER(m, 5), GATHER(m, 6), GATHER(m, 7)}
#define ROWS4(row, m) row(m), row((m) + 1), row((m) + 2), row((m) + 3)
#define ROWS16(row, m) ROWS4(row, m), ROWS4(row, (m) + 4), ROWS4(row, (m) + 8), ROWS4(row, (m) + 12)
#define ROWS64(row, m) ROWS16(row, m), ROWS16(row, (m) + 16), ROWS16(row, (m) + 32), ROWS16(row, (m) + 48)
#define ROWS256(row) ROWS64(row, 0), ROWS64(row, 64), ROWS64(row, 128), ROWS64(row, 192)

static const uint8_t EXPAND[256][16] = {ROWS256(EXPAND_ROW)};
static const uint8_t COMPRESS[256][16] = {ROWS256(COMPRESS_ROW)};

#endif
