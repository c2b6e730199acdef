/* state_codec: the bytes of a state's values. Private to state.c, state_check.c and state_peek.c.
 *
 * Every value is 8 bytes of XXH3-64 over what follows, seeded with the hash of its key, so that a value is neither
 * damaged nor another key's. Numbers are little-endian. */
#ifndef TANDEM_STATE_CODEC_H
#define TANDEM_STATE_CODEC_H

#include "base.h"
#include "state.h"

enum { STATE_SCHEMA_VERSION = 3 };

enum state_table { STATE_META, STATE_JOBS, STATE_PINS, STATE_RESULTS, STATE_ATTEMPTS, STATE_TABLES };
extern const char *const state_table_names[STATE_TABLES];

struct bytes_view {
    const void *bytes;
    size_t len;
};

/* Starts a value (leaves room for the checksum); fields are appended; state_value_seal fills the checksum in. */
void state_value_start(struct buf *value);
bool state_value_seal(struct buf *value, const void *key, size_t key_len); /* false: an append failed */
void state_put_u64(struct buf *value, uint64_t v);
void state_put_bytes(struct buf *value, const void *bytes, size_t len); /* length first */

/* Checks the checksum and gives what follows it. */
bool state_value_open(const void *key, size_t key_len, const void *value, size_t value_len, struct bytes_view *out);
/* Take fields from the front; false when it is too short. */
bool state_take_u64(struct bytes_view *v, uint64_t *out);
bool state_take_bytes(struct bytes_view *v, struct bytes_view *out);

/* Order numbers as keys: big-endian, so that the table's order is the registration's. */
void state_order_key(uint64_t order, unsigned char out[8]);

void state_job_encode(const struct state_job *j, struct buf *value);
/* Strings and digests of *out point into v; custom_id and source are followed by a NUL in the value. */
bool state_job_decode(struct bytes_view v, struct state_job *out);
void state_result_encode(const struct state_result *r, struct buf *value);
bool state_result_decode(struct bytes_view v, struct state_result *out);
void state_attempts_encode(const struct state_attempts *a, struct buf *value);
bool state_attempts_decode(struct bytes_view v, struct state_attempts *out);

/* The schema version that a meta value names; 0: it names none. */
unsigned state_version_decode(struct bytes_view v);

/* What meta keeps under "totals": counts of the registered jobs, and the number that the last result got. */
struct state_totals {
    struct state_counts counts;
    uint64_t settled;
};
void state_totals_encode(const struct state_totals *t, struct buf *value);
bool state_totals_decode(struct bytes_view v, struct state_totals *out);

/* The key of a pin: SHA-256 over line digest and custom_id. */
void state_pin_key(const char *custom_id, const unsigned char line_digest[32], unsigned char out[32]);

/* Walks every table of the environment in folder in a child process and checks every value: a damaged page may kill
 * its reader. RC_FAILED, EXIT_IO "state_damaged" when the child died or found damage. Called before the environment
 * is opened in this process: no LMDB handle crosses the fork. */
enum rc state_check(const char *folder, struct err *e);

#endif
