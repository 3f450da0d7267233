// The thread pool under ThreadSanitizer (scripts/sanitize): runs from several threads at once, tasks that ask for more
// tasks, changes of the number of threads, forked children. Ends with 1 when a task was lost or done twice.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "core/pool.h"

namespace {

constexpr int kTasks = 37;
std::atomic<int> failures{0};

// One run of some jobs whose tasks write plain memory: each slot by one task, and read by the caller afterwards.
void one_run(int jobs, bool nested) {
  needle::LiveRun live;
  const needle::Exec exec = needle::cpu_exec();
  std::vector<int> done(kTasks);
  for (int job = 1; job <= jobs; job++) {
    needle::parallel_for(&exec, kTasks, [&](int64_t t) {
      done[t]++;
      if (nested && t == 0) needle::parallel_for(&exec, 3, [&](int64_t) { done[0] += 0; });
    });
    for (int d : done)
      if (d != job) failures++;
  }
}

void callers(int n, int runs) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; i++)
    threads.emplace_back([=] {
      for (int r = 0; r < runs; r++) one_run(20, i == 0);
    });
  for (auto& t : threads) t.join();
}

}  // namespace

int main() {
  for (int n : {1, 2, 4, 3}) {
    needle::set_num_threads(n);
    callers(1, 100);
    callers(3, 50);
  }
  std::thread beside([] { callers(2, 50); });
  for (int i = 0; i < 20; i++) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      one_run(50, true);
      _exit(failures ? 1 : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) failures++;
  }
  beside.join();
  std::thread resize([] {
    for (int n = 1; n < 50; n++) needle::set_num_threads(n % 4 + 1);
  });
  callers(2, 50);
  resize.join();
  std::printf("pool: %d failures\n", failures.load());
  return failures ? 1 : 0;
}
