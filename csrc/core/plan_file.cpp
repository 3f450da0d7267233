#include "core/plan_file.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "core/digest.h"
#include "core/operands.h"
#include "cpu/backend.h"

// All numbers are little-endian. A file is: magic, version, 0, the head's bytes, the file's bytes, the head, a digest
// of all that, zeros up to a multiple of 64, the constants at multiples of 64, 64 zeros.
namespace needle {
namespace {

static_assert(std::endian::native == std::endian::little);
constexpr char kMagic[] = {'\x89', 'n', 'd', 'l', 'c', '\r', '\n', '\x1a'};
constexpr uint32_t kVersion = 3;
constexpr size_t kStart = 32, kAlign = 64;  // bytes before the head

size_t aligned(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

class Writer {
 public:
  template <class T>
  void number(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void text(const std::string& s) {
    number(static_cast<uint32_t>(s.size()));
    text_ += s;
  }
  template <class List, class Each>
  void list(const List& all, const Each& each) {
    number(static_cast<uint32_t>(all.size()));
    for (const auto& one : all) each(one);
  }
  void view(const View& v, bool strides) {
    number(static_cast<uint8_t>(v.dtype));
    number(static_cast<uint8_t>(v.rank));
    for (int i = 0; i < v.rank; i++) number(v.shape[i]);
    for (int i = 0; strides && i < v.rank; i++) number(v.stride[i]);
  }
  void ref(const Ref& r) {
    number(static_cast<uint8_t>(r.view.absent() ? Space::absent : r.space));
    if (r.view.absent()) return;
    number(static_cast<uint32_t>(r.index));
    number(r.offset);
    view(r.view, true);
  }
  std::string& bytes() { return text_; }

 private:
  std::string text_;
};

class Reader {
 public:
  Reader(const char* data, size_t bytes) : at_(data), end_(data + bytes) {}

  template <class T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  std::string text() {
    const size_t n = number<uint32_t>();
    const char* from = take(n);
    if (std::any_of(from, from + n, [](char c) { return c >= 0 && c < ' '; }))
      refuse("it has a text with control codes");
    return std::string(from, n);
  }
  template <class Each>
  auto list(const Each& each) {  // as long as there are bytes: a false count takes no memory
    std::vector<decltype(each())> all;
    for (uint32_t n = number<uint32_t>(); n > 0; n--) all.push_back(each());
    return all;
  }
  std::vector<std::string> texts() {
    return list([&] { return text(); });
  }
  View view(bool strides) {
    const size_t dtype = number<uint8_t>(), rank = number<uint8_t>();
    if (dtype >= std::size(kDTypes)) refuse("it has an array of an unknown dtype");
    if (rank > kMaxRank) refuse("it has an array of too many dimensions");
    Dims shape(rank), stride(rank);
    for (auto& n : shape) n = number<int64_t>();
    for (size_t i = 0; strides && i < rank; i++) stride[i] = number<int64_t>();
    return make_view(shape, strides ? &stride : nullptr, static_cast<DType>(dtype));
  }
  Ref ref() {
    const auto space = static_cast<Space>(number<uint8_t>());
    View none;
    none.rank = -1;
    if (space == Space::absent) return {space, 0, 0, none};
    if (space > Space::absent) refuse("it has an operand in an unknown memory");
    const auto index = static_cast<int32_t>(number<uint32_t>());
    const auto offset = number<int64_t>();
    return {space, index, offset, view(true)};
  }
  void end() const {
    if (at_ != end_) refuse("its head goes on behind its end");
  }

 private:
  const char* take(size_t bytes) {
    if (static_cast<size_t>(end_ - at_) < bytes) refuse("its head ends early");
    const char* from = at_;
    at_ += bytes;
    return from;
  }
  const char *at_, *end_;
};

void write_plan(Writer& w, const StoredPlan& p) {
  w.text(p.isa);
  w.number(static_cast<uint64_t>(p.arena_bytes));
  auto borders = [&](const std::vector<std::string>& names, const std::vector<View>& views) {
    w.list(names, [&](const std::string& name) { w.text(name); });
    w.list(views, [&](const View& v) { w.view(v, false); });
  };
  borders(p.input_names, p.inputs);
  borders(p.output_names, p.outputs);
  w.list(p.conditions, [&](const Condition& c) {
    w.list(c.expected, [&](double value) { w.number(value); });
    w.text(c.text);
  });
  w.number(static_cast<uint64_t>(p.checked));
  w.list(p.constants, [&](uint64_t c) { w.number(c); });
  w.list(p.kernels, [&](const std::string& kernel) { w.text(kernel); });
  w.list(p.steps, [&](const Step& step) {
    w.list(step.out, [&](const Ref& r) { w.ref(r); });
    w.list(step.in, [&](const Ref& r) { w.ref(r); });
    w.list(step.attr, [&](double a) { w.number(a); });
  });
}

// Whether there is an output of as many numbers for each condition.
bool conditions_fit(const StoredPlan& p) {
  if (p.conditions.size() > p.outputs.size()) return false;
  for (size_t i = 0; i < p.conditions.size(); i++)
    if (p.outputs[p.results() + i].size() != static_cast<int64_t>(p.conditions[i].expected.size())) return false;
  return true;
}

StoredPlan read_plan(Reader& r, size_t constants) {
  StoredPlan p;
  p.isa = r.text();
  p.arena_bytes = r.number<uint64_t>();
  auto borders = [&](std::vector<std::string>& names, std::vector<View>& views) {
    names = r.texts();
    views = r.list([&] { return r.view(false); });
    if (names.size() != views.size()) refuse("its inputs and outputs are not all named");
  };
  borders(p.input_names, p.inputs);
  borders(p.output_names, p.outputs);
  p.conditions = r.list([&] {
    Condition c;
    c.expected = r.list([&] { return r.number<double>(); });
    c.text = r.text();
    return c;
  });
  if (!conditions_fit(p)) refuse("its conditions are none of its outputs");
  p.checked = r.number<uint64_t>();
  p.constants = r.list([&] { return r.number<uint64_t>(); });
  for (uint64_t c : p.constants)
    if (c >= constants) refuse("it names a missing constant");
  p.kernels = r.texts();
  p.steps = r.list([&] {
    auto ref = [&] { return r.ref(); };
    Step step;
    step.out = r.list(ref), step.in = r.list(ref);
    step.attr = r.list([&] { return r.number<double>(); });
    return step;
  });
  if (p.steps.size() != p.kernels.size()) refuse("its steps do not all have a kernel");
  if (p.checked > p.steps.size()) refuse("its conditions are checked behind its end");
  return p;
}

}  // namespace

// ---- writing -------------------------------------------------------------------------------------------------------

void PlanFile::add(const Plan& plan, const Plan* checks, std::vector<std::string> input_names,
                   std::vector<std::string> output_names, std::vector<Condition> conditions) {
  StoredPlan p;
  p.isa = cpu_isa();
  p.inputs = plan.inputs(), p.outputs = plan.outputs();
  const size_t results = p.outputs.size();
  auto take = [&](const Plan& part, size_t outputs) {
    if (!part.device()->is_cpu()) refuse("[export] expects a plan on the CPU.");
    if (part.inputs().size() != p.inputs.size()) refuse("[export] expects checks of the plan's inputs.");
    p.arena_bytes = std::max(p.arena_bytes, part.arena_bytes());
    const size_t first = p.constants.size();
    for (const auto& storage : *part.constants()) {
      auto same = [&](const Constant& c) { return c.storage == storage; };
      const auto found = std::find_if(constants_.begin(), constants_.end(), same);
      p.constants.push_back(found - constants_.begin());
      if (found == constants_.end())
        constants_.push_back({.storage = storage, .digest = digest(storage->data(), storage->bytes())});
    }
    for (Step step : part.steps()) {
      for (auto* refs : {&step.out, &step.in})
        for (Ref& ref : *refs) {
          if (ref.view.absent()) continue;
          if (ref.space == Space::constant) ref.index += static_cast<int32_t>(first);
          if (ref.space == Space::output) ref.index += static_cast<int32_t>(outputs);
          if (ref.space == Space::constant && refs == &step.out) constants_[p.constants[ref.index]].written = true;
        }
      p.kernels.push_back(step.row->name);
      p.steps.push_back(std::move(step));
    }
  };
  if (checks) {
    p.outputs.insert(p.outputs.end(), checks->outputs().begin(), checks->outputs().end());
    take(*checks, results);
    p.checked = p.steps.size();
  }
  take(plan, 0);
  // As early as may be: kernels behind may refuse what conditions keep out.
  for (size_t i = 0; !checks && i < p.steps.size(); i++)
    for (const Ref& ref : p.steps[i].out)
      if (ref.space == Space::output && ref.index + conditions.size() >= results) p.checked = i + 1;
  p.input_names = std::move(input_names), p.output_names = std::move(output_names);
  if (p.input_names.size() != p.inputs.size() || p.output_names.size() != p.outputs.size())
    refuse("[export] expects a name for each input and output.");
  p.conditions = std::move(conditions);
  if (!conditions_fit(p)) refuse("[export] expects an output for each condition.");
  plans_.push_back(std::move(p));
}

void PlanFile::add(const PlanFile& other) {
  for (StoredPlan p : other.plans_) {
    for (uint64_t& c : p.constants) c += constants_.size();
    plans_.push_back(std::move(p));
  }
  constants_.insert(constants_.end(), other.constants_.begin(), other.constants_.end());
}

void PlanFile::write(const std::string& path) const {
  Writer head;
  head.text(NEEDLE_VERSION);
  head.text(NEEDLE_KERNELS);
  size_t data = 0;  // bytes of constants so far
  head.list(constants_, [&](const Constant& c) {
    head.number(static_cast<uint64_t>(data));
    head.number(static_cast<uint64_t>(c.storage->bytes()));
    head.number(c.digest);
    head.number(static_cast<uint8_t>(c.written));
    data += aligned(c.storage->bytes());
  });
  head.list(plans_, [&](const StoredPlan& p) { write_plan(head, p); });
  const size_t first = aligned(kStart + head.bytes().size() + sizeof(uint64_t));
  Writer w;
  w.bytes().assign(kMagic, sizeof kMagic);
  w.number(kVersion);
  w.number(uint32_t{0});
  w.number(static_cast<uint64_t>(head.bytes().size()));
  w.number(static_cast<uint64_t>(first + data + kAlign));
  w.bytes() += head.bytes();
  w.number(digest(w.bytes().data(), w.bytes().size()));
  w.bytes().resize(first);
  std::FILE* file = std::fopen(path.c_str(), "wbe");
  bool good = file != nullptr;
  auto put = [&](const void* from, size_t n) { good = good && std::fwrite(from, 1, n, file) == n; };
  put(w.bytes().data(), first);
  const char zeros[kAlign] = {};
  for (const Constant& c : constants_) {
    const size_t bytes = c.storage->bytes();
    put(c.storage->data(), bytes);
    put(zeros, aligned(bytes) - bytes);
  }
  put(zeros, kAlign);
  int error = good ? 0 : errno;
  if (file && std::fclose(file) != 0 && !error) error = errno;
  if (error) throw std::system_error(error, std::generic_category(), path);
}

// ---- reading -------------------------------------------------------------------------------------------------------

void PlanFile::refused(const std::string& path, const std::exception& e) {
  const std::string why = e.what();
  refuse("[open] " + path + " is no model that this library runs: " + why + (why.back() == '.' ? "" : "."));
}

PlanFile PlanFile::read(const std::string& path) try {
  auto file = std::make_shared<FileMap>(path);
  const char* data = file->data();
  const size_t bytes = file->bytes();
  if (bytes < sizeof kMagic || std::memcmp(data, kMagic, sizeof kMagic) != 0)
    refuse("it is none that exe.export wrote");
  if (bytes < kStart + sizeof(uint64_t)) refuse("it is cut off");
  Reader start(data + sizeof kMagic, kStart - sizeof kMagic);
  const auto version = start.number<uint32_t>();
  if (version != kVersion)
    refuse("it is of format " + std::to_string(version) + ", this library reads " + std::to_string(kVersion));
  const auto zero = start.number<uint32_t>();
  const auto head = start.number<uint64_t>(), all = start.number<uint64_t>();
  if (all != bytes) refuse("it has " + std::to_string(bytes) + " bytes of " + std::to_string(all));
  if (zero != 0 || head > bytes - kStart - sizeof(uint64_t)) refuse("its head does not fit into it");
  uint64_t noted;
  std::memcpy(&noted, data + kStart + head, sizeof noted);
  if (noted != digest(data, kStart + head)) refuse("its head is damaged");
  Reader r(data + kStart, head);
  const std::string made = r.text();
  if (r.text() != NEEDLE_KERNELS)
    refuse("it was exported by a needle " + made +
           " with other kernels than this needle " NEEDLE_VERSION "; export it again");
  const size_t first = aligned(kStart + head + sizeof noted);
  PlanFile found;
  found.path_ = path;
  found.constants_ = r.list([&]() -> Constant {
    const auto offset = r.number<uint64_t>(), size = r.number<uint64_t>(), digest = r.number<uint64_t>();
    const auto written = r.number<uint8_t>();
    if (written > 1) refuse("it does not say whether a constant is written");
    if (first > bytes || offset > bytes - first || size > bytes - first - offset || offset % kAlign)
      refuse("a constant lies outside of it");
    char* at = file->data() + first + offset;
    auto storage = std::make_shared<Storage>(cpu_backend(), at, size, [file] {});
    return {.storage = std::move(storage), .digest = digest, .written = written == 1};
  });
  found.plans_ = r.list([&] { return read_plan(r, found.constants_.size()); });
  r.end();
  return found;
} catch (const std::system_error& e) {
  refuse("[open] cannot read " + path + ": " + e.code().message() + ".");
} catch (const std::invalid_argument& e) {
  refused(path, e);
}

}  // namespace needle
