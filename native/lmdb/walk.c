/* lmdb/walk.c - see walk.h. */
#define _FILE_OFFSET_BITS 64
#define _XOPEN_SOURCE 700
#include "walk.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEAD = 16, NODE = 8, META = HEAD + 24 + 2 * 48 + 16, DB = 48, MOST_KEY = 511, DEEPEST = 32 };
enum { BRANCH = 1, LEAF = 2, OVERFLOW = 4, METAPAGE = 8 };
enum { BIGDATA = 1, SUBDATA = 2 };
enum { INTEGERKEY = 8, FREE_DB, MAIN_DB, NAMED_DB };
static const uint32_t MAGIC = 0xBEEFC0DE;

typedef struct tree_record {
    uint32_t pad;
    uint16_t flags, depth;
    uint64_t branches, leaves, overflows, entries, root;
} tree_record;

typedef struct spot {
    uint8_t key[MOST_KEY + 1];
    size_t bytes;
    int set;
} spot;

typedef struct walk {
    int file, heads;
    uint32_t psize;
    uint64_t pages; /* of the newest commit; all are in the file */
    uint8_t *live, *free, *buffers;
    tree_record *named; /* tables found in the main one, and their names */
    char (*names)[64];
    size_t tables;
    const char *table;
    lmdb_row_fn row;
    void *context;
    char *wrong;
    /* The tree that is being walked. */
    int which, chosen;
    tree_record found;
    spot last, floor;
} walk;

static uint16_t u16(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }
static uint32_t u32(const uint8_t *at) { return u16(at) | (uint32_t)u16(at + 2) << 16; }
static uint64_t u64(const uint8_t *at) { return u32(at) | (uint64_t)u32(at + 4) << 32; }

__attribute__((format(printf, 2, 3))) static int fail(walk *w, const char *text, ...) {
    va_list args;
    va_start(args, text);
    vsnprintf(w->wrong, LMDB_WRONG, text, args);
    va_end(args);
    return -1;
}

static int read_at(walk *w, uint64_t offset, void *out, size_t bytes) {
    for (size_t done = 0; done < bytes;) {
        ssize_t got = pread(w->file, (char *)out + done, bytes - done, (off_t)(offset + done));
        if (got <= 0) return fail(w, "%zu bytes at %" PRIu64 " cannot be read", bytes, offset);
        done += (size_t)got;
    }
    return 0;
}

static tree_record record_of(const uint8_t *at) {
    return (tree_record){u32(at), u16(at + 4), u16(at + 6), u64(at + 8), u64(at + 16), u64(at + 24), u64(at + 32), u64(at + 40)};
}

/* Count a page as reached. */
static int reach(walk *w, uint64_t page) {
    if (page < 2 || page >= w->pages) return fail(w, "page %" PRIu64 " of %" PRIu64 " is out of range", page, w->pages);
    if (w->live[page / 8] >> page % 8 & 1) return fail(w, "page %" PRIu64 " is used twice", page);
    w->live[page / 8] |= (uint8_t)(1 << page % 8);
    return 0;
}

static int compare(const walk *w, const uint8_t *key, size_t bytes, const spot *other) {
    if (w->which == FREE_DB) { /* whole numbers */
        uint64_t a = u64(key), b = u64(other->key);
        return (a > b) - (a < b);
    }
    int order = memcmp(key, other->key, bytes < other->bytes ? bytes : other->bytes);
    return order ? order : (bytes > other->bytes) - (bytes < other->bytes);
}

static void keep(spot *to, const uint8_t *key, size_t bytes) {
    memcpy(to->key, key, bytes);
    to->bytes = bytes;
    to->set = 1;
}

/* Pages that commits no longer use: a count, then page numbers in descending order. */
static int free_list(walk *w, uint64_t page, const uint8_t *value, size_t bytes) {
    uint64_t before = UINT64_MAX;
    if (bytes < 8 || bytes % 8 || u64(value) != bytes / 8 - 1) return fail(w, "page %" PRIu64 ": a list of free pages has another length", page);
    for (size_t at = 8; at < bytes; at += 8) {
        uint64_t one = u64(value + at);
        if (one >= before || one < 2 || one >= w->pages) return fail(w, "page %" PRIu64 ": the list of free pages is out of order or range", page);
        if (w->free[one / 8] >> one % 8 & 1) return fail(w, "page %" PRIu64 " is free twice", one);
        w->free[one / 8] |= (uint8_t)(1 << one % 8);
        before = one;
    }
    return 0;
}

static int own_pages(walk *w, uint64_t page, uint64_t first, size_t bytes) {
    uint64_t need = (HEAD - 1 + (uint64_t)bytes) / w->psize + 1;
    uint8_t head[HEAD];
    if (first >= w->pages || need > w->pages - first) return fail(w, "page %" PRIu64 " names a value out of range", page);
    for (uint64_t i = 0; i < need; i++)
        if (reach(w, first + i) < 0) return -1;
    w->found.overflows += need;
    if (w->heads || w->which == FREE_DB) {
        if (read_at(w, first * w->psize, head, HEAD) < 0) return -1;
        if (u64(head) != first || u16(head + 10) != OVERFLOW || u32(head + 12) != need)
            return fail(w, "page %" PRIu64 " is not the first of a value of %" PRIu64 " pages", first, need);
    }
    if (w->which != FREE_DB) return 0;
    uint8_t *value = malloc(bytes);
    if (!value) return -2;
    int done = read_at(w, first * w->psize + HEAD, value, bytes);
    if (done == 0) done = free_list(w, page, value, bytes);
    free(value);
    return done;
}

static int named(walk *w, uint64_t page, const uint8_t *key, size_t bytes, const uint8_t *value) {
    tree_record db = record_of(value);
    if (db.flags) return fail(w, "page %" PRIu64 ": a table of another kind (%u)", page, db.flags);
    if (bytes >= sizeof *w->names || w->tables >= 64) return fail(w, "page %" PRIu64 ": more tables, or longer names, than are known", page);
    memset(w->names[w->tables], 0, sizeof *w->names);
    memcpy(w->names[w->tables], key, bytes);
    w->named[w->tables++] = db;
    return 0;
}

static int leaf_node(walk *w, uint64_t page, const uint8_t *node, size_t left) {
    size_t key_bytes = u16(node + 6), bytes = u32(node);
    uint16_t flags = u16(node + 4);
    const uint8_t *key = node + NODE, *value = key + key_bytes;
    if (!key_bytes || key_bytes > MOST_KEY || (w->which == FREE_DB && key_bytes != 8)) return fail(w, "page %" PRIu64 ": a key of %zu bytes", page, key_bytes);
    if (flags & ~(BIGDATA | (w->which == MAIN_DB ? SUBDATA : 0))) return fail(w, "page %" PRIu64 ": a node of another kind (%u)", page, flags);
    if (w->last.set && compare(w, key, key_bytes, &w->last) <= 0) return fail(w, "page %" PRIu64 ": keys are out of order", page);
    if (w->floor.set && compare(w, key, key_bytes, &w->floor) < 0) return fail(w, "page %" PRIu64 ": a key lies on another page than its branch says", page);
    keep(&w->last, key, key_bytes);
    w->floor.set = 0;
    w->found.entries++;
    if (flags & BIGDATA) {
        if (left < NODE + key_bytes + 8) return fail(w, "page %" PRIu64 ": a value is cut off", page);
        int done = own_pages(w, page, u64(value), bytes);
        return done == 0 && w->chosen ? w->row(w->context, key, key_bytes, NULL, bytes) : done;
    }
    if (bytes > left - NODE - key_bytes) return fail(w, "page %" PRIu64 ": a value is cut off", page);
    if (flags & SUBDATA) return bytes == DB ? named(w, page, key, key_bytes, value) : fail(w, "page %" PRIu64 ": a table's record has %zu bytes", page, bytes);
    if (w->which == FREE_DB) return free_list(w, page, value, bytes);
    return w->chosen ? w->row(w->context, key, key_bytes, value, bytes) : 0;
}

/* The page `number` at `level` levels above the leaves, and all below it. */
static int walk_page(walk *w, uint64_t number, int level) {
    uint8_t *page = w->buffers + (size_t)level * w->psize;
    if (reach(w, number) < 0 || read_at(w, number * w->psize, page, w->psize) < 0) return -1;
    uint32_t lower = u16(page + 12), upper = u16(page + 14), n = (lower - HEAD) / 2;
    if (u64(page) != number || u16(page + 10) != (level ? BRANCH : LEAF)) return fail(w, "page %" PRIu64 " is another page, or of another kind", number);
    if (lower < HEAD || lower % 2 || lower > upper || upper > w->psize || n < (level ? 2 : 1)) return fail(w, "page %" PRIu64 ": its bounds are wrong", number);
    *(level ? &w->found.branches : &w->found.leaves) += 1;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = u16(page + HEAD + 2 * i);
        if (at < upper || at % 2 || at + NODE > w->psize || at + NODE + u16(page + at + 6) > w->psize) return fail(w, "page %" PRIu64 ": node %u is out of bounds", number, i);
        const uint8_t *node = page + at;
        int done;
        if (!level) {
            done = leaf_node(w, number, node, w->psize - at);
        } else {
            size_t bytes = u16(node + 6);
            if (i) { /* the first key of a branch stands for all that are smaller */
                if (!bytes || bytes > MOST_KEY || (w->which == FREE_DB && bytes != 8) || (w->last.set && compare(w, node + NODE, bytes, &w->last) <= 0))
                    return fail(w, "page %" PRIu64 ": keys are out of order", number);
                keep(&w->floor, node + NODE, bytes);
            }
            done = walk_page(w, u32(node) | (uint64_t)u16(node + 4) << 32, level - 1);
        }
        if (done) return done;
    }
    return 0;
}

static int walk_tree(walk *w, const tree_record *db, int which, const char *name) {
    w->which = which;
    w->chosen = which == NAMED_DB && w->table && strcmp(name, w->table) == 0;
    w->found = (tree_record){0};
    w->last.set = w->floor.set = 0;
    if (db->root == UINT64_MAX) {
        if (db->depth || db->entries || db->leaves || db->branches || db->overflows) return fail(w, "table '%s' has counts and no page", name);
        return 0;
    }
    if (!db->depth || db->depth > DEEPEST) return fail(w, "table '%s' has a depth of %u", name, db->depth);
    int done = walk_page(w, db->root, db->depth - 1);
    if (done) return done;
    const tree_record *found = &w->found;
    if (found->branches != db->branches || found->leaves != db->leaves || found->overflows != db->overflows || found->entries != db->entries)
        return fail(w, "table '%s' counts its pages or entries wrongly", name);
    return 0;
}

/* The newest of the two meta pages. */
static int newest(walk *w, tree_record *free_db, tree_record *main_db) {
    uint8_t pages[2][META];
    struct stat file;
    if (fstat(w->file, &file) < 0) return fail(w, "its size cannot be read");
    if (read_at(w, 0, pages[0], META) < 0) return -1;
    w->psize = u32(pages[0] + HEAD + 24);
    if (w->psize < 256 || w->psize > 32768 || (w->psize & (w->psize - 1))) return fail(w, "a page size of %u bytes", w->psize);
    if (read_at(w, w->psize, pages[1], META) < 0) return -1;
    uint64_t txn[2];
    for (uint64_t i = 0; i < 2; i++) {
        const uint8_t *head = pages[i], *meta = head + HEAD;
        if (u64(head) != i || u16(head + 10) != METAPAGE || u32(meta) != MAGIC || u32(meta + 4) != 1 || u32(meta + 24) != w->psize)
            return fail(w, "meta page %" PRIu64 " is damaged", i);
        txn[i] = u64(meta + 128);
        if (txn[i] && (txn[i] & 1) != i) return fail(w, "meta page %" PRIu64 " is of another commit", i);
    }
    const uint8_t *meta = pages[txn[1] > txn[0]] + HEAD;
    *free_db = record_of(meta + 24);
    *main_db = record_of(meta + 72);
    w->pages = u64(meta + 120) + 1;
    if (w->pages < 2 || w->pages > (uint64_t)file.st_size / w->psize) return fail(w, "pages are missing at its end");
    if (free_db->flags != INTEGERKEY || main_db->flags) return fail(w, "its tables are of another kind");
    return 0;
}

int lmdb_walk(int file, int heads, const char *table, lmdb_row_fn row, void *context, char wrong[LMDB_WRONG]) {
    walk w = {.file = file, .heads = heads, .table = table, .row = row, .context = context, .wrong = wrong};
    tree_record free_db, main_db;
    wrong[0] = 0;
    if (newest(&w, &free_db, &main_db) < 0) return -1;
    size_t bits = (size_t)(w.pages / 8 + 1);
    w.live = calloc(bits, 1);
    w.free = calloc(bits, 1);
    w.buffers = malloc((size_t)DEEPEST * w.psize);
    w.named = malloc(64 * sizeof *w.named);
    w.names = malloc(64 * sizeof *w.names);
    int done = w.live && w.free && w.buffers && w.named && w.names ? 0 : -2;
    if (!done) done = walk_tree(&w, &main_db, MAIN_DB, "main");
    if (!done) done = walk_tree(&w, &free_db, FREE_DB, "free");
    for (size_t i = 0; !done && i < w.tables; i++) done = walk_tree(&w, w.named + i, NAMED_DB, w.names[i]);
    for (size_t i = 0; !done && i < bits; i++)
        if (w.live[i] & w.free[i]) done = fail(&w, "a page near %zu is free and in use", i * 8);
    free(w.live);
    free(w.free);
    free(w.buffers);
    free(w.named);
    free(w.names);
    return done;
}
