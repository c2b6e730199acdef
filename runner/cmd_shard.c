/* cmd_shard: a model cut into one part a rank, or such a folder checked against its source.
 *
 * What was cut answers as its source does, under the same identity. A line a file goes to standard output. */
#include <inttypes.h>
#include <stdio.h>

#include "model_shard_write.h"
#include "options.h"

struct total {
    size_t files;
    uint64_t bytes;
};

static void print_file(void *ctx, const char *name, size_t n_tensors, uint64_t n_bytes)
{
    struct total *t = ctx;
    t->files++;
    t->bytes += n_bytes;
    if (n_tensors) printf("%-26s %14" PRIu64 " bytes  %zu tensors\n", name, n_bytes, n_tensors);
    else printf("%-26s %14" PRIu64 " bytes\n", name, n_bytes);
}

int cmd_shard(const struct options *o)
{
    struct err e = {0};
    struct model_file *m = NULL;
    struct model_config c;
    struct partition p;
    struct total total = {0};
    const struct shard_report report = {&total, print_file};
    char text[1100];
    enum rc rc = model_file_open(o->files[0], &m, &e);
    if (rc == RC_OK) rc = model_config_read(m, &c, &e);
    if (rc == RC_OK) rc = partition_make(&c, o->ranks, PARTITION_FFN_STEP, &p, &e);
    if (rc == RC_OK)
        rc = o->verify ? model_shard_verify(m, &p, o->out, &report, &e) : model_shard_write(m, &c, &p, o->out, o->force, &report, &e);
    if (rc == RC_OK)
        printf("%-26s %14" PRIu64 " bytes  %s for %d rank%s\n", "all", total.bytes, o->verify ? "the same as the source" : "cut", p.ranks,
               p.ranks == 1 ? "" : "s");
    else
        log_line(LOG_ERROR, "%s", err_format(&e, text, sizeof text));
    model_file_close(m);
    return rc == RC_OK ? EXIT_DONE : e.exit_status ? e.exit_status : EXIT_INTERNAL;
}
