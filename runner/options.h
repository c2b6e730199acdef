/* options: argv to one validated struct, from one table that also prints --help and the man page. */
#ifndef TANDEM_OPTIONS_H
#define TANDEM_OPTIONS_H

#include "base.h"
#include "chat_template.h"
#include "deadline.h"
#include "engine.h"
#include "state.h"

enum { OPTIONS_MAX_FILES = 256 };

struct options {
    const char *files[OPTIONS_MAX_FILES]; /* positional */
    int n_files;
    const char *model;
    const char *out;
    const char *state;        /* NULL: OUT.state */
    bool state_on_network;    /* --state-on-network */
    const char *root;         /* NULL: the job file's folder */
    const char *backend;      /* "auto", "cpu", "cuda" */
    const char *gpus;         /* "0,1": one for each rank of each group; NULL: the first ones */
    const char *sum_path;     /* "auto", "host", "peer", "nccl", "local"; NULL: "auto" */
    bool no_graphs;           /* CUDA: launch every kernel of a round anew */
    const char *isa;          /* "auto", "amx", "vnni", "avx512", "avx2", "generic" */
    const char *chat_format;  /* NULL: detected */
    int ranks;                /* default: rank_backend_ranks; shard: 2 */
    int groups;               /* default 1 */
    int threads;              /* per rank; 0: cores / (ranks * groups), at least 1 */
    int active;               /* default 4 */
    int context;              /* 0: the model's */
    int64_t kv_tokens;        /* 0: active * context */
    double memory_gib;        /* model: of one rank, 0: not given */
    const char *kv;           /* "f16", "f32", "bf16", "int8" */
    const char *weights;      /* "native", "w8" */
    const char *spec;         /* "auto", "mtp", "ngram", "off"; NULL: "auto", in bench "off" */
    int drafts;               /* default 3 */
    int prefill_rows;         /* 0: 512 */
    const char *order;        /* "input", "tree"; NULL: tree where there is a cache */
    const char *cache;        /* run: folder of the prefix stores, NULL: none */
    bool no_cache;            /* as given; cache is NULL then */
    int cache_gib;            /* most that a rank's part holds, 0: no bound; default 64 */
    int cache_free_gib;       /* what its file system keeps free; default 4 */
    struct lockstep_bounds bounds; /* --collective-timeout, --lockstep-timeout, --watchdog: seconds, decimals allowed */
    double grace_s;           /* --grace, default 20 */
    int64_t checkpoint_us;    /* --checkpoint, default 60 s; 0: none are made */
    const char *checkpoints;  /* of ranks: the folder they are in, or NULL. No option: a run derives it from its state */
    struct deadline_rules deadline; /* --deadline, --until, --window */
    bool final;               /* run, export: what is left becomes batch_expired */
    bool output_by_completion; /* --output-order completion */
    double prefill_rate, decode_rate; /* plan: tokens a second, 0: not given */
    bool salvage;             /* export: --state is damaged, make a new one of it */
    int64_t job_timeout_us;   /* --job-timeout; 0: none */
    int restarts;             /* --restarts: restarts of a group without progress before giving up, default 5 */
    int job_failures;         /* --job-failures, default 3 */
    bool skip_bad_lines;      /* --on-bad-line skip */
    bool force;
    bool verify;              /* shard: check, write nothing */
    bool trace;
    bool quiet;
    bool json;                /* status: machine-readable */
    bool show;                /* tokenize: pieces as well */
    struct fault fault;       /* --fault, test option */
    double audit_percent;     /* run: share of the answers that is computed again */
    const char *metrics;      /* run: Prometheus text file, NULL: none */
    bool dry_run;             /* retry-failed: list only */
    const char *retry_code;   /* retry-failed: error code, NULL: any */
    int retry_status;         /* retry-failed: status_code, 0: any */
    int64_t bench_prompt, bench_tokens, bench_sequences, bench_repeats;
    const char *bench_text;   /* "code", "zh"; NULL: random ids */
    const char *bench_as;     /* "0/2": this rank's share, alone; NULL: real ranks */
    double bench_accept;      /* of drafts, 0: as measured */
    bool csv;
    double prune_gib;         /* cache prune: what may stay, < 0: not given */
    double prune_days;        /* cache prune: what was not used for so long goes, < 0: not given */
};

struct command {
    const char *name;
    const char *synopsis;   /* "JOBS… --model M --out OUT" */
    const char *summary;
    int (*run)(const struct options *o); /* exit status */
    bool hidden;
};
extern const struct command command_table[]; /* ends with name NULL; defined in main.c */

/* Parses argv[2..) for a command. Errors: RC_BAD_INPUT, EXIT_USAGE, text names the option. */
enum rc options_parse(const struct command *c, int argc, char **argv, struct options *out, struct err *e);
void options_print_help(const struct command *c); /* NULL: the whole program */
void options_print_man(void);
/* The state folder of a command: --state, or OUT.state. Appended to out. */
enum rc options_state_folder(const struct options *o, struct buf *out, struct err *e);
/* mode, with STATE_ON_NETWORK where the command line allows it. */
enum state_mode options_state_mode(const struct options *o, enum state_mode mode);

int cmd_check(const struct options *o);
int cmd_plan(const struct options *o);
int cmd_run(const struct options *o);
int cmd_status(const struct options *o);
int cmd_export(const struct options *o);
int cmd_retry_failed(const struct options *o);
int cmd_model(const struct options *o);
int cmd_tokenize(const struct options *o);
int cmd_bench(const struct options *o);
int cmd_shard(const struct options *o);
int cmd_cache(const struct options *o);

#endif
