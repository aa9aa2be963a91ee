// attend.cuh - what a launch of attention over parts is told: runs of rows of K and V as they are stored.
//
// The host lays these structures out (ctxreuse/cuda/attend_layout.py has the same fields) and has checked that every row
// lies in its plane. Formats and scales are those of ctxreuse/kernels/attention.py, whose fp32 the device does not take.
#ifndef CTX_ATTEND_CUH
#define CTX_ATTEND_CUH

#include "numbers.cuh"

enum Format : u32 { ROWS_FP16 = 1, ROWS_BF16 = 2, ROWS_INT8 = 3, ROWS_INT4 = 4 };

// K or V of one layer. Rows begin at multiples of 16 bytes. Steps of rows in bytes, of scales in elements.
struct AttendPlane {
    u64 data;        // address of row 0 of head 0
    u64 scales;      // int8: float [heads][tokens]; int4: bytes [heads][steps, lows][groups][tokens]
    i64 head;
    i64 scale_head;
    i64 scale_low;   // from steps to lows
    i64 scale_group; // from group to group
    u32 row, format;
};

// Rows first..last of a part, which one block goes through.
struct AttendRun {
    AttendPlane k, v;
    u64 cosine, sine; // float [angles]: what queries are turned by for this part
    u64 hidden;       // u32 [tokens / 32]: bit t % 32 of word t / 32: nobody sees row t; or 0
    u64 seen;         // i32 [queries][2]: the rows that a query sees; or 0: all
    i32 first, last;
    i32 clear_first, clear_last; // rows that every query sees
    u32 angles, interleaved;
};

// The runs of a block.
struct AttendItem {
    u32 run, runs;
};

#endif
