/* export: an archive from durable state: output.jsonl, error.jsonl, timing.jsonl, manifest.json. */
#ifndef TANDEM_EXPORT_H
#define TANDEM_EXPORT_H

#include "base.h"
#include "state.h"

/* Existing output of another origin (its manifest's state id differs, or it is no tandem archive) is EXIT_NO_OUTPUT
 * unless force. Sizes come from a first pass over the state. The manifest holds tool version, identity, input
 * digest, counts, sizes and SHA-256 of the members, and nothing that changes between two exports of one state. If
 * the archive at path already holds exactly this state, it is left untouched. */
struct export_options {
    bool force;
    bool final;         /* jobs without a result get a batch_expired record, in the archive alone: to the state they are pending */
    bool by_completion; /* records in the order in which they were settled, then those of final; else in job-file order */
};
enum rc export_archive(struct state *s, const char *path, const struct export_options *o, struct err *e);
/* Whether export_archive would be allowed to write path and could start to: the same refusals, before hours of work. */
enum rc export_check(struct state *s, const char *path, bool force, struct err *e);

#endif
