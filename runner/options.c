/* options: one table for parsing, help and the man page.
 *
 * A row says everything about an option: its name, what it takes and within which bounds, where the value goes, its
 * default as text, which commands know it, and its help. Parsing walks argv once; values are checked as they come,
 * rules between options after the last one. Errors name the option as typed. Numbers are decimal, read without a
 * locale; nothing is taken from the environment. Pointers in the result point into argv. */
#define _GNU_SOURCE
#include "options.h"
#include "rank_backend.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "build_identity.h"
#include "job_spec.h"

enum option_type {
    OPTION_FLAG,    /* bool */
    OPTION_TEXT,    /* const char * */
    OPTION_WORD,    /* const char *, one of words */
    OPTION_SWITCH,  /* bool: true for the second of two words */
    OPTION_INT,     /* int */
    OPTION_INT64,   /* int64_t */
    OPTION_DECIMAL, /* double */
    OPTION_MICROS,  /* int64_t, given in seconds */
    OPTION_TIME,    /* int64_t, UNIX seconds */
    OPTION_CLOCK,   /* int, minutes after midnight */
    OPTION_WINDOW,  /* struct deadline_window */
    OPTION_FAULT    /* struct fault */
};

struct option_row {
    const char *name;  /* without the dashes */
    const char *takes; /* placeholder; NULL: a flag */
    enum option_type type;
    size_t offset;
    double min, max;      /* of numbers, as given; exact up to 2^53 */
    const char *words;    /* "a|b" */
    const char *standard; /* default, as shown; NULL: none */
    const char *commands; /* " run check " */
    const char *help;
};

#define AT(field) offsetof(struct options, field)
#define MODEL_USERS " run bench "

static const struct option_row rows[] = {
    {"model", "M", OPTION_TEXT, AT(model), 0, 0, NULL, NULL, " run check plan bench ",
     "The model: a GGUF file, a folder with config.json and safetensors, or a folder made by shard. synth:NAME has made-up "
     "weights, for measuring. check and plan use its tokenizer only."},
    {"out", "OUT", OPTION_TEXT, AT(out), 0, 0, NULL, NULL, " run export shard retry-failed ",
     "Where the records go. The suffix decides: .tar.zst, .tar.gz, .tar.xz, .tar, .zip; anything else is a folder. shard: the "
     "folder. retry-failed: whose state it is."},
    {"state", "DIR", OPTION_TEXT, AT(state), 0, 0, NULL, "OUT.state", " run export retry-failed ",
     "Durable state: finished results and what else a second run needs to continue. Must lie on a local disk."},
    {"state-on-network", NULL, OPTION_FLAG, AT(state_on_network), 0, 0, NULL, NULL, " run status export retry-failed ",
     "Accept a state on a network file system, where its locks may not work: no other machine may use it."},
    {"root", "DIR", OPTION_TEXT, AT(root), 0, 0, NULL, "the job file's folder", " run check plan ",
     "Documents are opened beneath this folder and nowhere else."},
    {"on-bad-line", "WHAT", OPTION_SWITCH, AT(skip_bad_lines), 0, 0, "fail|skip", "fail", " run check plan ",
     "A line that is no job: fail runs nothing and exits 65; skip makes an error record of it and runs the rest."},
    {"force", NULL, OPTION_FLAG, AT(force), 0, 0, NULL, NULL, " run export shard ",
     "Replace an existing OUT that comes from another state or is no archive of tandem. shard: replace an older cut."},
    {"verify", NULL, OPTION_FLAG, AT(verify), 0, 0, NULL, NULL, " shard ",
     "Write nothing: compare every byte of OUT with the model's."},
    {"ranks", "N", OPTION_INT, AT(ranks), 1, MAX_RANKS, NULL, "2; one on a single GPU", " run bench model shard ",
     "Rank processes that hold one model together."},
    {"groups", "N", OPTION_INT, AT(groups), 1, 16, NULL, "1", " run ", "Groups of ranks, each with a whole model."},
    {"threads", "N", OPTION_INT, AT(threads), 0, 1024, NULL, "cores / (ranks * groups)", MODEL_USERS,
     "Threads of each rank. Never changes an answer."},
    {"active", "N", OPTION_INT, AT(active), 1, 64, NULL, "4", " run bench model ", "Jobs computed at once by a group."},
    {"context", "TOKENS", OPTION_INT, AT(context), 0, 1 << 24, NULL, "the model's", " run check plan bench model ",
     "Longest prompt plus answer of one job."},
    {"kv-tokens", "TOKENS", OPTION_INT64, AT(kv_tokens), 0, 1e12, NULL, "active * context", " run check plan bench model ",
     "Tokens whose keys and values fit into a group's memory, over all active jobs."},
    {"memory", "GIB", OPTION_DECIMAL, AT(memory_gib), 0.001, 1 << 20, NULL, NULL, " model ",
     "Memory of one rank: how long a context would fit."},
    {"kv", "FORMAT", OPTION_WORD, AT(kv), 0, 0, "f16|f32|bf16|int8", "f16", " run bench model ",
     "How keys and values are stored. int8: 64 values share a scale, keys rotated by a Hadamard matrix."},
    {"weights", "FORM", OPTION_WORD, AT(weights), 0, 0, "native|w8", "native", " run bench model ",
     "native: as the model stores them; w8: made 8-bit integers with a scale for 128 while loading."},
    {"spec", "HOW", OPTION_WORD, AT(spec), 0, 0, "auto|mtp|ngram|off", "auto; bench: off", MODEL_USERS,
     "Drafts of the next tokens: by the model's MTP layer (always), from repetitions of the text (while that pays), auto: whichever "
     "pays. Never changes an answer."},
    {"drafts", "K", OPTION_INT, AT(drafts), 1, KERN_MAX_DRAFTS, NULL, "3", MODEL_USERS,
     "Most drafts that one round checks."},
    {"prefill-rows", "ROWS", OPTION_INT, AT(prefill_rows), 0, 8192, NULL, "512; 2048 on GPUs", MODEL_USERS,
     "Prompt tokens computed in one step, a multiple of 64."},
    {"order", "HOW", OPTION_WORD, AT(order), 0, 0, "input|tree", "tree with --cache, else input", " run ",
     "Which jobs are computed first, within one priority (\"tandem\": {\"priority\": 5} in a job line; higher ones come first). tree: "
     "those that begin alike one after the other."},
    {"output-order", "ORDER", OPTION_SWITCH, AT(output_by_completion), 0, 0, "input|completion", "input", " run export ",
     "Order of the archive's records: of the job files, or in which jobs ended."},
    {"cache", "DIR", OPTION_TEXT, AT(cache), 0, 0, NULL, NULL, " run ",
     "Heads that several prompts share are computed once and kept here, for this run and later ones. Any number of runs may use it. "
     "Never changes an answer."},
    {"no-cache", NULL, OPTION_FLAG, AT(no_cache), 0, 0, NULL, NULL, " run ",
     "No cache, whatever --cache says."},
    {"cache-gib", "GIB", OPTION_INT, AT(cache_gib), 0, 1 << 20, NULL, "64", " run ",
     "Most that DIR may hold for each rank; 0: no bound. What was not used for longest goes first."},
    {"cache-free-gib", "GIB", OPTION_INT, AT(cache_free_gib), 0, 1 << 20, NULL, "4", " run ",
     "Room that the cache leaves on its file system."},
    {"backend", "NAME", OPTION_WORD, AT(backend), 0, 0, "auto|cpu|cuda", "auto", " run bench model ",
     "Where the model is computed. auto: on GPUs where there is one for every rank, else on the CPU."},
    {"gpus", "LIST", OPTION_TEXT, AT(gpus), 0, 0, NULL, "0,1,...", " run bench model ",
     "The GPU of each rank of each group, as 0,1. Two ranks may share one: slow, for tests."},
    {"sum-path", "NAME", OPTION_WORD, AT(sum_path), 0, 0, "auto|host|peer|nccl|local", "auto", " run bench ",
     "How GPU ranks exchange sums; auto: the fastest. Never changes an answer. local: benchmarks of one rank without peers."},
    {"no-graphs", NULL, OPTION_FLAG, AT(no_graphs), 0, 0, NULL, NULL, " run bench ",
     "Launch every GPU kernel of a round anew. Never changes an answer."},
    {"isa", "NAME", OPTION_WORD, AT(isa), 0, 0, "auto|amx|vnni|avx512|avx2|generic", "auto", MODEL_USERS,
     "Instruction set of the CPU backend."},
    {"chat-format", "NAME", OPTION_TEXT, AT(chat_format), 0, 0, NULL, "detected", " run check plan tokenize ",
     "How messages become a prompt: smollm2, chatml, qwen2.5, qwen3.5, qwen3.8. tokenize: take the input as one user "
     "message."},
    {"collective-timeout", "SECONDS", OPTION_MICROS, AT(bounds.collective_us), 0.001, 86400, NULL, "20", MODEL_USERS,
     "A rank waits this long for a peer in a sum whose heartbeat stands still."},
    {"lockstep-timeout", "SECONDS", OPTION_MICROS, AT(bounds.lockstep_us), 0.001, 86400, NULL, "40", MODEL_USERS,
     "The same for a peer's plan or record. Longer than --collective-timeout."},
    {"watchdog", "SECONDS", OPTION_MICROS, AT(bounds.watchdog_us), 0.001, 86400, NULL, "90", MODEL_USERS,
     "The same for the runner, on every rank. Longer than --lockstep-timeout."},
    {"checkpoint", "SECONDS", OPTION_MICROS, AT(checkpoint_us), 0, 86400, NULL, "60", " run ",
     "Longest time between saves of what running jobs have so far; more often while that is cheap. After a crash or a stop they go on "
     "from there. 0: none; TERM then waits for running jobs."},
    {"grace", "SECONDS", OPTION_DECIMAL, AT(grace_s), 0, 86400, NULL, "20", " run ",
     "After TERM or INT: ranks that have not saved what runs by then are killed. Before a deadline: work ends this long before it, so "
     "that the archive is there in time."},
    {"deadline", "TIME", OPTION_TIME, AT(deadline.at_s), 0, 0, NULL, NULL, " run ",
     "The run is over by then: a time as 2026-01-02T06:00:00Z or with an offset. What is not done stays pending, the exit is 75. Of "
     "several deadlines the earliest counts, SLURM_JOB_END_TIME among them."},
    {"until", "HH:MM", OPTION_CLOCK, AT(deadline.until_min), 0, 0, NULL, NULL, " run ",
     "A deadline at the next such local time."},
    {"window", "HH:MM-HH:MM", OPTION_WINDOW, AT(deadline.window), 0, 0, NULL, NULL, " run ",
     "Work between these local times only: a deadline at their end; outside, a run ends at once with 75 and does nothing."},
    {"final", NULL, OPTION_FLAG, AT(final), 0, 0, NULL, NULL, " run export ",
     "What a deadline leaves is a batch_expired error in the archive, the exit 1. The state keeps it pending: a later run does it. "
     "export: the same of all that is pending."},
    {"salvage", NULL, OPTION_FLAG, AT(salvage), 0, 0, NULL, NULL, " export ",
     "--state is damaged: make a new state of what can be read of it, as OUT.state, and the archive of that. run with this OUT "
     "does what was lost."},
    {"job-timeout", "SECONDS", OPTION_MICROS, AT(job_timeout_us), JOB_TIMEOUT_MIN_S, JOB_TIMEOUT_MAX_S, NULL, NULL, " run ",
     "A job that is computed for longer is cancelled and becomes a request_timeout error. What a job line says itself, as "
     "\"tandem\": {\"timeout_s\": 60}, comes first."},
    {"restarts", "N", OPTION_INT, AT(restarts), 0, 1000, NULL, "5", " run ",
     "Restarts of a group without a finished job in between before giving up with 69."},
    {"job-failures", "N", OPTION_INT, AT(job_failures), 1, 1000, NULL, "3", " run ",
     "A job that was running when ranks failed this often runs alone; as often again, and it becomes an error record."},
    {"trace", NULL, OPTION_FLAG, AT(trace), 0, 0, NULL, NULL, " run bench ",
     "Record hashes of the hidden state and the logits of every generated token."},
    {"quiet", NULL, OPTION_FLAG, AT(quiet), 0, 0, NULL, NULL, " run check plan export retry-failed bench ",
     "No progress and no final line; warnings and errors stay."},
    {"prefill-rate", "TOKENS/S", OPTION_DECIMAL, AT(prefill_rate), 0.001, 1e9, NULL, NULL, " plan ",
     "Prompt tokens a second, as bench or an earlier run measured them: with --decode-rate, how long the jobs take."},
    {"decode-rate", "TOKENS/S", OPTION_DECIMAL, AT(decode_rate), 0.001, 1e9, NULL, NULL, " plan ",
     "Generated tokens a second of all active jobs together."},
    {"json", NULL, OPTION_FLAG, AT(json), 0, 0, NULL, NULL, " run plan status bench cache ", "One JSON object on stdout; run: at its end."},
    {"audit", "PERCENT", OPTION_DECIMAL, AT(audit_percent), 0, 100, NULL, "0", " run ",
     "When all is done and the archive is there, compute this share of the run's answers again, by new ranks and without the cache, "
     "and compare. A difference is an error line and exit 70; what a deadline or a signal leaves is skipped."},
    {"metrics", "FILE", OPTION_TEXT, AT(metrics), 0, 0, NULL, NULL, " run ",
     "Figures of the run for Prometheus (node_exporter's textfile collector), replaced at least every 15 s while it goes on, and at "
     "its end. Use one FILE a job file."},
    {"code", "CODE", OPTION_TEXT, AT(retry_code), 0, 0, NULL, NULL, " retry-failed ",
     "Only errors of this code, as engine_error or request_timeout."},
    {"status", "N", OPTION_INT, AT(retry_status), 400, 599, NULL, NULL, " retry-failed ",
     "Only errors of this status_code, as 500."},
    {"dry-run", NULL, OPTION_FLAG, AT(dry_run), 0, 0, NULL, NULL, " retry-failed ",
     "Change nothing: write status, code and custom_id of each to standard output. Needs no lock."},
    {"show", NULL, OPTION_FLAG, AT(show), 0, 0, NULL, NULL, " tokenize ", "Each token's piece of text beside its id."},
    {"prompt", "TOKENS", OPTION_INT64, AT(bench_prompt), 1, 1 << 24, NULL, "512", " bench ", "Tokens of each prompt."},
    {"tokens", "TOKENS", OPTION_INT64, AT(bench_tokens), 1, 1 << 24, NULL, "128", " bench ",
     "Tokens generated by each sequence."},
    {"sequences", "N", OPTION_INT64, AT(bench_sequences), 1, 64, NULL, "1", " bench ", "Sequences at once."},
    {"repeats", "N", OPTION_INT64, AT(bench_repeats), 1, 1000, NULL, "3", " bench ", "Measurements after one warm-up."},
    {"text", "KIND", OPTION_WORD, AT(bench_text), 0, 0, "code|zh", "random ids", " bench ",
     "Prompts of numbered blocks of code or of Chinese text, cut to --prompt tokens."},
    {"as-rank", "R/N", OPTION_TEXT, AT(bench_as), 0, 0, NULL, NULL, " bench ",
     "round, kernel, sum: one rank's share of N, computed alone; sums pretend that the others sent the same."},
    {"accept", "SHARE", OPTION_DECIMAL, AT(bench_accept), 0, 1, NULL, "as measured", " bench ",
     "round: the share of drafts taken as right in tokens/s, where made-up weights say nothing about it."},
    {"csv", NULL, OPTION_FLAG, AT(csv), 0, 0, NULL, NULL, " bench ", "round, kernel, sum: comma-separated values."},
    {"to", "GIB", OPTION_DECIMAL, AT(prune_gib), 0, 1 << 20, NULL, NULL, " cache ",
     "prune: delete what was least recently used until each rank has no more than this."},
    {"unused", "DAYS", OPTION_DECIMAL, AT(prune_days), 0, 36500, NULL, NULL, " cache ",
     "prune: delete what was not used for this long."},
    {"fault", "RANK:KIND@STEP", OPTION_FAULT, AT(fault), 0, 0, NULL, NULL, MODEL_USERS,
     "Test option: this rank fails once, in this step. KIND: exit, kill, stop, hang, token, state, plan."},
};
enum { N_ROWS = sizeof rows / sizeof *rows };

/* How many positional arguments a command takes, and what must be given. */
struct command_rule {
    const char *name;
    int min_files, max_files;
    const char *files; /* what they are, for messages */
    bool model, out;   /* required */
};
static const struct command_rule rules[] = {
    {"check", 1, OPTIONS_MAX_FILES, "job files", false, false},
    {"plan", 1, OPTIONS_MAX_FILES, "job files", true, false},
    {"run", 1, OPTIONS_MAX_FILES, "job files", true, true},
    {"status", 1, 1, "one archive or state folder", false, false},
    {"export", 0, 0, "no file names", false, true},
    {"retry-failed", 0, 0, "no file names", false, false},
    {"model", 1, 1, "one model file", false, false},
    {"tokenize", 1, 1, "one model file", false, false},
    {"shard", 1, 1, "one model", false, true},
    {"cache", 2, 2, "stat, verify or prune, and a folder", false, false},
    {"bench", 1, 1, "decode, prefill, round, kernel or sum", true, false},
};

static const struct {
    int status;
    const char *meaning;
} exit_table[] = {
    {EXIT_DONE, "all jobs done, or nothing to do"},
    {EXIT_SOME_FAILED, "finished, some jobs failed (check, plan: would fail; cache verify: found damage)"},
    {EXIT_USAGE, "command line"},
    {EXIT_JOB_FILE, "job file invalid, nothing ran"},
    {EXIT_NO_INPUT, "an input is missing"},
    {EXIT_UNAVAILABLE, "model or ranks unavailable after retries"},
    {EXIT_INTERNAL, "internal error, or --audit found an answer that differs"},
    {EXIT_NO_OUTPUT, "the output cannot be created, or would replace something else"},
    {EXIT_IO, "I/O error or disk full; the state is intact"},
    {EXIT_RESUMABLE, "stopped early, outside --window, or the state is in use; the same command continues"},
    {EXIT_CONFIG, "configuration: a state of other settings, an impossible setting"},
};

/* ---- the table ---- */

static bool row_is_for(const struct option_row *row, const char *command)
{
    char word[32];
    snprintf(word, sizeof word, " %s ", command);
    return strstr(row->commands, word) != NULL;
}

static const struct option_row *row_find(const char *name, size_t len)
{
    for (size_t i = 0; i < N_ROWS; i++)
        if (strlen(rows[i].name) == len && !memcmp(rows[i].name, name, len)) return &rows[i];
    return NULL;
}

static const struct command_rule *rule_find(const char *command)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        if (!strcmp(rules[i].name, command)) return &rules[i];
    return NULL;
}

static bool word_in(const char *words, const char *text)
{
    size_t len = strlen(text);
    for (const char *at = words; *at; at += strcspn(at, "|"), at += *at == '|')
        if (strcspn(at, "|") == len && len && !memcmp(at, text, len)) return true;
    return false;
}

/* Letters to change, add or drop to get from a to b; both short. */
static int edit_distance(const char *a, const char *b)
{
    int row[40];
    int n = (int)strlen(b);
    if (n >= 40) return 40;
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int corner = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int change = corner + (a[i - 1] != b[j - 1]), drop = row[j] + 1, add = row[j - 1] + 1;
            corner = row[j];
            row[j] = change < drop ? change : drop;
            if (add < row[j]) row[j] = add;
        }
    }
    return row[n];
}

static const char *nearest_name(const char *command, const char *given)
{
    const char *best = NULL;
    int best_distance = 3;
    for (size_t i = 0; i < N_ROWS; i++) {
        if (!row_is_for(&rows[i], command)) continue;
        int distance = edit_distance(given, rows[i].name);
        if (distance < best_distance) best_distance = distance, best = rows[i].name;
    }
    return best;
}

/* ---- values ---- */

static enum rc bad(struct err *e, const struct option_row *row, const char *value, const char *wanted)
{
    return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_value", "--%s %s: %s", row->name, value, wanted);
}

/* Decimal digits, for seconds with one point; nothing else, so no "inf", hex or locale. */
static bool number_parse(const char *text, bool decimals, double *out)
{
    size_t digits = 0, points = 0;
    for (const char *at = text; *at; at++) {
        if (isdigit((unsigned char)*at))
            digits++;
        else if (*at == '.' && decimals)
            points++;
        else
            return false;
    }
    if (!digits || points > 1 || digits > 15) return false;
    *out = strtod(text, NULL);
    return true;
}

static enum rc number_set(const struct option_row *row, const char *value, void *at, struct err *e)
{
    double number;
    char wanted[96];
    bool decimals = row->type == OPTION_DECIMAL || row->type == OPTION_MICROS;
    snprintf(wanted, sizeof wanted, "must be a %s from %.15g to %.15g", decimals ? "number" : "whole number", row->min,
             row->max);
    if (!number_parse(value, decimals, &number) || number < row->min || number > row->max)
        return bad(e, row, value, wanted);
    if (row->type == OPTION_INT)
        *(int *)at = (int)number;
    else if (row->type == OPTION_INT64)
        *(int64_t *)at = (int64_t)number;
    else if (row->type == OPTION_MICROS)
        *(int64_t *)at = (int64_t)(number * 1e6 + 0.5);
    else
        *(double *)at = number;
    return RC_OK;
}

/* Types that have one form alone. */
static enum rc form_set(const struct option_row *row, const char *value, void *at, struct err *e)
{
    if (row->type == OPTION_TIME)
        return deadline_parse_time(value, at) ? RC_OK : bad(e, row, value, "must be a time as 2026-01-02T06:00:00Z or "
                                                                           "2026-01-02T06:00:00+01:00");
    if (row->type == OPTION_CLOCK) return deadline_parse_clock(value, at) ? RC_OK : bad(e, row, value, "must be a time as 06:00");
    return deadline_parse_window(value, at) ? RC_OK : bad(e, row, value, "must be two different times as 22:00-06:00");
}

static enum rc value_set(const struct option_row *row, const char *value, struct options *o, struct err *e)
{
    void *at = (char *)o + row->offset;
    char wanted[96];
    switch (row->type) {
    case OPTION_FLAG: *(bool *)at = true; return RC_OK;
    case OPTION_FAULT: return fault_parse(value, at, e);
    case OPTION_TIME:
    case OPTION_CLOCK:
    case OPTION_WINDOW: return form_set(row, value, at, e);
    case OPTION_TEXT:
        if (!*value) return bad(e, row, "''", "must not be empty");
        *(const char **)at = value;
        return RC_OK;
    case OPTION_WORD:
    case OPTION_SWITCH:
        snprintf(wanted, sizeof wanted, "must be one of %s", row->words);
        if (!word_in(row->words, value)) return bad(e, row, value, wanted);
        if (row->type == OPTION_WORD)
            *(const char **)at = value;
        else
            *(bool *)at = strcmp(value, strchr(row->words, '|') + 1) == 0;
        return RC_OK;
    case OPTION_INT:
    case OPTION_INT64:
    case OPTION_DECIMAL:
    case OPTION_MICROS: return number_set(row, value, at, e);
    }
    return RC_OK;
}

/* ---- parsing ---- */

static struct options options_standard(void)
{
    return (struct options){
        .backend = "auto",
        .isa = "auto",
        .kv = "f16",
        .weights = "native",
        .drafts = 3,
        .groups = 1,
        .active = 4,
        .bounds = lockstep_bounds_default(),
        .cache_gib = 64,
        .cache_free_gib = 4,
        .grace_s = 20,
        .checkpoint_us = 60000000,
        .deadline = DEADLINE_RULES_NONE,
        .restarts = 5,
        .job_failures = 3,
        .bench_prompt = 512,
        .bench_tokens = 128,
        .bench_sequences = 1,
        .bench_repeats = 3,
        .prune_gib = -1,
        .prune_days = -1,
    };
}

static enum rc unknown_option(const struct command *c, const char *arg, size_t name_len, struct err *e)
{
    char name[40];
    snprintf(name, sizeof name, "%.*s", (int)name_len, arg + 2);
    if (row_find(arg + 2, name_len))
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "unknown_option", "tandem %s has no option --%s", c->name, name);
    const char *near = nearest_name(c->name, name);
    if (near)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "unknown_option", "unknown option --%s; did you mean --%s?", name,
                       near);
    return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "unknown_option", "unknown option --%s", name);
}

/* One option at argv[*i]; *i is left on the last word it took. */
static enum rc option_take(const struct command *c, int argc, char **argv, int *i, struct options *o, struct err *e)
{
    const char *arg = argv[*i];
    size_t name_len = strcspn(arg + 2, "=");
    const char *value = arg[2 + name_len] == '=' ? arg + 2 + name_len + 1 : NULL;
    const struct option_row *row = row_find(arg + 2, name_len);
    if (!row || !row_is_for(row, c->name)) return unknown_option(c, arg, name_len, e);
    if (!row->takes) {
        if (value) return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_value", "--%s takes no value", row->name);
    } else if (!value) {
        if (*i + 1 >= argc)
            return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "missing_value", "--%s needs a value: %s", row->name,
                           row->takes);
        value = argv[++*i];
    }
    return value_set(row, value, o, e);
}

static enum rc file_take(const struct command_rule *rule, const char *arg, struct options *o, struct err *e)
{
    if (!rule || o->n_files >= rule->max_files)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "unexpected_argument", "unexpected argument %s", arg);
    if (!*arg) return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "empty_argument", "an argument is empty");
    o->files[o->n_files++] = arg;
    return RC_OK;
}

static enum rc rules_check(const struct command *c, const struct command_rule *rule, const struct options *o,
                           struct err *e)
{
    if (!rule) return RC_OK;
    if (o->n_files < rule->min_files)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "missing_argument", "tandem %s needs %s", c->name, rule->files);
    if (rule->model && !o->model)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "missing_option", "tandem %s needs --model", c->name);
    if (rule->out && !o->out)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "missing_option", "tandem %s needs --out", c->name);
    if (!strcmp(c->name, "retry-failed") && !o->out && !o->state)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "missing_option", "tandem %s needs --out or --state", c->name);
    if (o->salvage && !o->state)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "missing_option", "--salvage needs --state, the damaged one");
    if (!strcmp(c->name, "bench") && !word_in("decode|prefill|round|kernel|sum", o->files[0]))
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_argument", "tandem bench needs %s, not %s", rule->files, o->files[0]);
    if (!strcmp(c->name, "cache")) {
        bool prune = !strcmp(o->files[0], "prune"), given = o->prune_gib >= 0 || o->prune_days >= 0;
        if (!word_in("stat|verify|prune", o->files[0]))
            return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_argument", "tandem cache needs %s, not %s", rule->files, o->files[0]);
        if (prune != given)
            return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_argument", "--to and --unused are for tandem cache prune, which needs one");
    }
    if ((o->prefill_rate > 0) != (o->decode_rate > 0))
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_argument", "--prefill-rate and --decode-rate are given together or not at all");
    if (o->prefill_rows % 64)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_value", "--prefill-rows %d: must be a multiple of 64",
                       o->prefill_rows);
    if (o->fault.kind != FAULT_NONE && o->fault.rank >= o->ranks)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_value", "--fault names rank %d of %d", o->fault.rank,
                       o->ranks);
    if (o->bench_sequences > o->active && !strcmp(c->name, "bench"))
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_value", "--sequences %lld: more than --active %d",
                       (long long)o->bench_sequences, o->active);
    enum rc rc = lockstep_bounds_check(&o->bounds, e);
    if (rc != RC_OK && e && !e->exit_status) e->exit_status = EXIT_USAGE;
    return rc;
}

enum rc options_parse(const struct command *c, int argc, char **argv, struct options *out, struct err *e)
{
    const struct command_rule *rule = rule_find(c->name);
    bool only_files = false;
    *out = options_standard();
    for (int i = 2; i < argc; i++) {
        enum rc rc;
        if (only_files || argv[i][0] != '-' || argv[i][1] == '\0') {
            rc = file_take(rule, argv[i], out, e);
        } else if (!strcmp(argv[i], "--")) {
            only_files = true;
            continue;
        } else if (argv[i][1] == '-') {
            rc = option_take(c, argc, argv, &i, out, e);
        } else {
            rc = err_set(e, RC_BAD_INPUT, EXIT_USAGE, "unknown_option", "unknown option %s; options begin with --",
                         argv[i]);
        }
        if (rc != RC_OK) return rc;
    }
    if (out->no_cache) out->cache = NULL;
    if (!out->ranks) out->ranks = strcmp(c->name, "shard") ? rank_backend_ranks(out) : 2;
    return rules_check(c, rule, out, e);
}

enum rc options_state_folder(const struct options *o, struct buf *out, struct err *e)
{
    if (o->state) {
        buf_append_str(out, o->state);
    } else {
        /* "answers/" is the folder answers: its state lies beside it, not in it. */
        size_t len = strlen(o->out);
        while (len > 1 && o->out[len - 1] == '/') len--;
        buf_append(out, o->out, len);
        buf_append_str(out, ".state");
    }
    return out->failed ? err_no_memory(e) : RC_OK;
}

enum state_mode options_state_mode(const struct options *o, enum state_mode mode)
{
    return o->state_on_network ? mode | STATE_ON_NETWORK : mode;
}

/* ---- help ---- */

static void print_wrapped(const char *text, int indent, int column)
{
    enum { WIDTH = 79 };
    while (*text) {
        int len = (int)strcspn(text, " ");
        if (column > indent && column + 1 + len > WIDTH) {
            printf("\n%*s", indent, "");
            column = indent;
        } else if (column > indent) {
            putchar(' ');
            column++;
        }
        printf("%.*s", len, text);
        column += len;
        text += len;
        text += *text == ' ';
    }
    putchar('\n');
}

static void row_describe(const struct option_row *row, char *out, size_t out_bytes)
{
    if (row->words && row->standard)
        snprintf(out, out_bytes, "%s One of %s (default %s).", row->help, row->words, row->standard);
    else if (row->standard)
        snprintf(out, out_bytes, "%s (default: %s)", row->help, row->standard);
    else
        snprintf(out, out_bytes, "%s", row->help);
}

static void print_rows(const char *command)
{
    enum { INDENT = 28 };
    for (size_t i = 0; i < N_ROWS; i++) {
        if (!row_is_for(&rows[i], command)) continue;
        char head[64], text[400];
        int n = snprintf(head, sizeof head, "  --%s%s%s", rows[i].name, rows[i].takes ? " " : "",
                         rows[i].takes ? rows[i].takes : "");
        row_describe(&rows[i], text, sizeof text);
        if (n > INDENT - 2)
            printf("%s\n%*s", head, INDENT, "");
        else
            printf("%-*s", INDENT, head);
        print_wrapped(text, INDENT, INDENT);
    }
}

void options_print_help(const struct command *c)
{
    if (c) {
        printf("usage: tandem %s %s\n\n", c->name, c->synopsis);
        print_wrapped(c->summary, 0, 0);
        putchar('\n');
        print_rows(c->name);
        return;
    }
    printf("usage: tandem COMMAND ...\n\n"
           "Runs batches of language-model jobs on ranks in lockstep, and never loses an answer.\n\n");
    for (const struct command *at = command_table; at->name; at++) {
        if (at->hidden) continue;
        printf("  tandem %s %s\n      ", at->name, at->synopsis);
        print_wrapped(at->summary, 6, 6);
    }
    printf("  tandem help COMMAND\n      Options of a command. Also: tandem --version, tandem --man\n\nexit codes:\n");
    for (size_t i = 0; i < sizeof exit_table / sizeof *exit_table; i++)
        printf("  %2d  %s\n", exit_table[i].status, exit_table[i].meaning);
}

/* ---- man page ---- */

/* Text for roff: backslashes and hyphens written out, no line that starts with a control character. */
static void roff_print(const char *text)
{
    if (*text == '.' || *text == '\'') fputs("\\&", stdout);
    for (; *text; text++) {
        if (*text == '\\')
            fputs("\\e", stdout);
        else if (*text == '-')
            fputs("\\-", stdout);
        else
            putchar(*text);
    }
}

static void roff_line(const char *macro, const char *text)
{
    fputs(macro, stdout);
    roff_print(text);
    putchar('\n');
}

static void man_command(const struct command *c)
{
    fputs(".SS tandem ", stdout);
    roff_line("", c->name);
    fputs(".B tandem ", stdout);
    roff_line("", c->name);
    roff_line("", c->synopsis);
    puts(".PP");
    roff_line("", c->summary);
    for (size_t i = 0; i < N_ROWS; i++) {
        if (!row_is_for(&rows[i], c->name)) continue;
        char text[400];
        row_describe(&rows[i], text, sizeof text);
        fputs(".TP\n\\fB\\-\\-", stdout);
        roff_print(rows[i].name);
        fputs("\\fR", stdout);
        if (rows[i].takes) {
            fputs(" \\fI", stdout);
            roff_print(rows[i].takes);
            fputs("\\fR", stdout);
        }
        putchar('\n');
        roff_line("", text);
    }
}

void options_print_man(void)
{
    printf(".TH TANDEM 1 \"\" \"tandem %s\" \"User Commands\"\n", TANDEM_VERSION);
    puts(".SH NAME\ntandem \\- batch jobs for language models on ranks in lockstep\n.SH SYNOPSIS");
    for (const struct command *c = command_table; c->name; c++) {
        if (c->hidden) continue;
        fputs(".B tandem ", stdout);
        roff_line("", c->name);
        roff_line("", c->synopsis);
        puts(".br");
    }
    puts(
        ".SH DESCRIPTION\nReads job files of one JSON object a line, computes the answers on processes that check each "
        "other after\nevery step, and writes one archive of records. Finished answers are durable at once: the same "
        "command\nagain continues where an interrupted one stopped, and changes nothing after the end.\n"
        "Standard output carries only what was asked for; progress, warnings and the final line go to standard error.\n"
        ".SH COMMANDS");
    for (const struct command *c = command_table; c->name; c++)
        if (!c->hidden) man_command(c);
    puts(".SH EXIT STATUS");
    for (size_t i = 0; i < sizeof exit_table / sizeof *exit_table; i++) {
        printf(".TP\n.B %d\n", exit_table[i].status);
        roff_line("", exit_table[i].meaning);
    }
    puts(".SH SIGNALS\nThe first TERM or INT stops early with 75 and loses no finished answer; the second stops at "
         "once.\nUSR1 makes a run say on standard error how far it is.");
}
