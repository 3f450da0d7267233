// Opening libraries at run time.
#pragma once
#include <dlfcn.h>
#include <glob.h>

#include <initializer_list>
#include <sstream>
#include <string>
#include <vector>

namespace needle::gpu::vendor {

// Folders whose nvidia/*/lib hold the libraries of PyPI's wheels.
inline std::string& wheel_folders() {
  static auto* folders = new std::string;
  return *folders;
}

inline std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> parts;
  std::istringstream stream(list);
  for (std::string part; std::getline(stream, part, ':');) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

inline std::vector<std::string> matching(const std::string& pattern) {
  glob_t found = {};
  std::vector<std::string> paths;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0) paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  return paths;
}

// The first of `names` in NEEDLE_VENDOR_LIBRARIES, among what the process or the system has, or in wheels; `text` gets
// the loader's reason when there is none.
inline void* open_library(std::initializer_list<const char*> names, std::string* text) {
  const char* own = std::getenv("NEEDLE_VENDOR_LIBRARIES");
  std::string missing;
  for (const char* name : names) {
    std::vector<std::string> paths;
    for (const std::string& folder : split(own ? own : "")) paths.push_back(folder + "/" + name);
    paths.push_back(name);
    for (const std::string& folder : split(wheel_folders())) {
      for (const std::string& path : matching(folder + "/nvidia/*/lib/" + name)) paths.push_back(path);
    }
    for (const std::string& path : paths) {
      if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
      if (const char* error = dlerror(); path == name && error)
        missing += (missing.empty() ? "" : "; ") + std::string(error);
    }
  }
  *text = missing;
  return nullptr;
}

// False, and its name in `text`, when the library lacks the function.
template <class F>
bool find(void* library, const char* name, F** function, std::string* text) {
  *function = reinterpret_cast<F*>(dlsym(library, name));
  if (!*function) *text = std::string("the library has no ") + name;
  return *function != nullptr;
}

// The file in which a function of a library lies.
template <class F>
std::string place(F* function) {
  Dl_info info;
  return dladdr(reinterpret_cast<void*>(function), &info) && info.dli_fname ? info.dli_fname : "";
}

// 0, or the first error of the calls so far.
struct Status {
  int error = 0;
  template <class S>
  void operator()(S status) {
    if (!error) error = static_cast<int>(status);
  }
};

// What create(&handle) gave when it was called first and only then.
template <class Handle, class Create>
Handle handle_from(Create create, Status& status) {
  static int failed = 0;
  static Handle handle = [&] {
    Handle made = nullptr;
    failed = static_cast<int>(create(&made));
    return made;
  }();
  status(failed);
  return handle;
}

}  // namespace needle::gpu::vendor
