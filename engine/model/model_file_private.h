/* model_file_private: what model_config and the fuzzers need of a model file beyond its public face. */
#ifndef TANDEM_MODEL_FILE_PRIVATE_H
#define TANDEM_MODEL_FILE_PRIVATE_H

#include "gguf.h"
#include "model_file.h"
#include "model_folder.h"
#include "model_shard.h"

/* A folder in memory; its bytes must outlive the model file. */
enum rc model_file_open_blobs(const struct model_blob *blobs, size_t n_blobs, const char *name, struct model_file **out,
                              struct err *e);
/* The i-th small file beside the weights, 0 .. MODEL_FOLDER_TEXTS - 1, as it is stored; false: there is none. */
bool model_file_stored_text(const struct model_file *m, int i, const char **name, struct model_text *out);
const struct gguf *model_file_gguf(const struct model_file *m);         /* empty for other containers */
const struct model_shard *model_file_shard(const struct model_file *m); /* empty for other containers */
/* Where model_file_json's text came from, for messages; the model's path where there is none. */
const char *model_file_json_path(const struct model_file *m, enum model_json kind);

#endif
