/* lmdb/walk.h - an LMDB file read without LMDB, which trusts what it reads and ends the process over a damaged page.
 *
 * Data format 1 (LMDB 0.9), 64 bits, little-endian, tables of plain keys and values: what this project writes. Nobody may
 * write the file meanwhile. Every length and page number is hostile.
 */
#ifndef CTXREUSE_LMDB_WALK_H
#define CTXREUSE_LMDB_WALK_H

#include <stddef.h>
#include <stdint.h>

enum { LMDB_WRONG = 160 };

/* One row of the table that was named, in the order of keys; other than 0 ends the walk. A value in pages of its own comes
 * as NULL. */
typedef int (*lmdb_row_fn)(void *context, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes);

/* Walk all pages that the newest commit reaches: each is what it says, in bounds and reached once, keys ascend, counts are
 * those of the records, and no free page is in use. `heads`: also the first page of each value that has pages of its own,
 * which is one read a value. Rows of `table` (NULL: none) go to `row`. 0; -1 with the first error in `wrong`, -2 without
 * memory, or what `row` returned. */
int lmdb_walk(int file, int heads, const char *table, lmdb_row_fn row, void *context, char wrong[LMDB_WRONG]);

#endif
