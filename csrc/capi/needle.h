/* Runs models that needle exported (`exe.export("model.ndlc")`), without Python. C99; no C++ exception leaves the
 * library.
 *
 * Functions that return an int return 0 where all is well, else another number; needle_last_error() then says why, in a
 * sentence. A model may be run by any number of threads at a time: they share its weights, which stay in the file's
 * pages, and each run computes in memory of its own. But one that keeps state: see needle_has_state. */
#ifndef NEEDLE_H
#define NEEDLE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NEEDLE_MAX_RANK 8

typedef struct needle_model needle_model;

typedef enum { NEEDLE_FLOAT32, NEEDLE_FLOAT64, NEEDLE_INT32, NEEDLE_INT64, NEEDLE_BOOL } needle_dtype;

/* An input or output: a contiguous array, row by row; bools are bytes of 0 or 1. */
typedef struct {
  const char* name; /* as long as the model is open */
  needle_dtype dtype;
  int rank;
  int64_t shape[NEEDLE_MAX_RANK];
  size_t bytes; /* of all elements */
} needle_tensor;

/* Opens a file for this machine: what it has for the best instruction set that the CPU has, too. The file must stay as
 * it is while the model is open; write another and rename it in place of the first. `*model` is NULL where that fails.
 */
int needle_open(const char* path, needle_model** model);

/* Frees a model that no thread runs any more; NULL is nothing. */
void needle_close(needle_model* model);

/* A file may hold several plans, each for other shapes of the inputs: numbers 0, 1, ... of `plan` below. */
int needle_plan_count(const needle_model* model);            /* 0 for NULL */
int needle_input_count(const needle_model* model, int plan); /* -1 where there is no such plan */
int needle_output_count(const needle_model* model, int plan);
int needle_input(const needle_model* model, int plan, int index, needle_tensor* tensor);
int needle_output(const needle_model* model, int plan, int index, needle_tensor* tensor);

/* The instruction set that the model runs with: "avx512", "avx2", "neon" or "scalar". */
const char* needle_isa(const needle_model* model);

/* Runs a plan. `inputs` and `outputs`: an address for each, of so many bytes as the tensors say, at a multiple of the
 * size of an element; an output that overlaps an input or another output is refused. A model that holds for some
 * inputs alone (a branch on their values, lengths of packed rows) refuses others; outputs then hold nothing. */
int needle_run(needle_model* model, int plan, const void* const* inputs, void* const* outputs);

/* 1 for a model that keeps state: buffers that its runs write and later runs read, such as counters, averages or a
 * decoder's cache; 0 for others and NULL. It begins as the file says, and all plans share it. A model with state has
 * one run at a time: one that comes while another thread's is under way is refused and changes nothing, so that who
 * runs it says in which order. A run whose inputs are refused changes no state. Open the file once for each user of
 * their own: its weights are in memory once, its state once for each. A process that forks while a thread runs the
 * model opens it anew in the child. */
int needle_has_state(const needle_model* model);

/* Gives the state the values that it has in the file. Refused while the model runs. */
int needle_reset(needle_model* model);

/* Threads that a run may use, of the process, 1 to 1024; at first the cores that it may use, or NEEDLE_NUM_THREADS. Not
 * while a model runs. */
int needle_set_threads(int threads);
int needle_threads(void);

/* Why the last call of this thread that failed did. */
const char* needle_last_error(void);

const char* needle_version(void);

#ifdef __cplusplus
}
#endif

#endif
