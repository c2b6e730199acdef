/* kern_cpu_tiles: what the users of AMX tiles share, private to engine/cpu.
 *
 * Tile instructions overlap only where nothing waits: a product takes 52 cycles and starts every 16; a store of its sums that
 * follows at once holds up everything behind it. So the sums of a tile are stored when the tile is needed again, after the
 * products of the other three, and worked on while further products run.
 *
 * The intrinsics are opaque to the compiler and say nothing of memory: tiles_order keeps what is stored before them before. */
#ifndef TANDEM_KERN_CPU_TILES_H
#define TANDEM_KERN_CPU_TILES_H

#include <immintrin.h>
#include <stdatomic.h>
#include <stdint.h>

enum { TILE_ROWS = 16, TILE_ROW_BYTES = 64 };

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

static inline __attribute__((always_inline)) void tiles_order(void) { atomic_signal_fence(memory_order_seq_cst); }

#endif
