// A file's bytes as private memory: pages are read on use and copied when written, so that no write reaches the file.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>

namespace needle {

class FileMap {
 public:
  explicit FileMap(const std::string& path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // what is no file must not wait
    struct stat status{};
    const bool known = file >= 0 && ::fstat(file, &status) == 0;
    const char* wrong = !known                     ? nullptr
                        : !S_ISREG(status.st_mode) ? "it is no regular file"
                        : status.st_size           ? nullptr
                                                   : "it is empty";
    if (known && !wrong) {
      bytes_ = static_cast<size_t>(status.st_size);
      data_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    }
    const int error = errno;
    if (file >= 0) ::close(file);
    if (wrong) throw std::invalid_argument(wrong);
    if (data_ == MAP_FAILED) throw std::system_error(error, std::generic_category(), path);
  }
  ~FileMap() { ::munmap(data_, bytes_); }
  FileMap(const FileMap&) = delete;
  FileMap& operator=(const FileMap&) = delete;

  char* data() const { return static_cast<char*>(data_); }
  size_t bytes() const { return bytes_; }

  // Forgets the whole pages inside [first, first + bytes): the next read takes them from the file, so writes are lost.
  void forget(char* first, size_t bytes) const {
    const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(first) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(first) + bytes) / page * page;
    if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
  }

 private:
  void* data_ = MAP_FAILED;
  size_t bytes_ = 0;
};

}  // namespace needle
