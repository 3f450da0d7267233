/* Forks beside two threads that run a model: fork_race model.ndlc forks. Ends with 1 when a child waits for what a
 * thread of its parent held, or has another result. */
#include <needle.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static needle_model* model;
static atomic_int over;

/* Runs the first plan, of one input and one output, on numbers of its own. */
static int run(float* out, size_t bytes) {
  static const float in[4096] = {1.0f, 2.0f, 3.0f};
  const void* inputs[] = {in};
  void* outputs[] = {out};
  memset(out, 0, bytes);
  return needle_run(model, 0, inputs, outputs);
}

static void* runs(void* memory) {
  while (!atomic_load(&over)) run(memory, 4);
  return NULL;
}

int main(int argc, char** argv) {
  static float want[4096], mine[4096], theirs[2][4096];
  needle_tensor t;
  if (argc < 3 || needle_open(argv[1], &model) || needle_output(model, 0, 0, &t)) return 2;
  if (needle_set_threads(2) || run(want, t.bytes)) return 2;
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, runs, theirs[i]);
  int forks = atoi(argv[2]), failed = 0;
  for (int i = 0; i < forks && !failed; i++) {
    pid_t child = fork();
    if (child == 0) {
      alarm(60);
      int bad = run(mine, t.bytes) || memcmp(mine, want, t.bytes) || run(mine, t.bytes) || memcmp(mine, want, t.bytes);
      _exit(bad ? 1 : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    failed = status != 0;
  }
  atomic_store(&over, 1);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
  return failed;
}
