// Products with epilogues through cuBLASLt or hipBLASLt, whose functions differ by prefix only. Their matrices are
// column-major, so the product made is out^T = b^T a^T, and a bias runs along its rows.
#pragma once
#include <memory>
#include <mutex>

#include "gpu/gemm.cuh"
#include "gpu/vendor/load.h"
#include "gpu/vendor/problem.h"

// The functions by their names without prefix.
// clang-format off
#define LT_FUNCTIONS(F) \
  F(Create) F(MatmulDescCreate) F(MatmulDescDestroy) F(MatmulDescSetAttribute) F(MatrixLayoutCreate) \
  F(MatrixLayoutDestroy) F(MatrixLayoutSetAttribute) F(MatmulPreferenceCreate) F(MatmulPreferenceDestroy) \
  F(MatmulPreferenceSetAttribute) F(MatmulAlgoGetHeuristic) F(Matmul)
// clang-format on

namespace needle::gpu::vendor {

// A column-major matrix in memory: `turned` when the product takes its transpose.
struct Columns {
  bool turned;
  int64_t rows, columns, leading, batch;
};

// The transpose of `v` (batch, rows, columns) as such a matrix; false when neither axis is dense.
inline bool as_columns(const View& v, Columns* to) {
  const int64_t rows = v.shape[1], columns = v.shape[2];
  auto fits = [](int64_t near, int64_t extent, int64_t far, int64_t others) {
    return (near == 1 || extent == 1) && (far >= extent || others == 1);
  };
  if (fits(v.stride[2], columns, v.stride[1], rows)) {
    *to = {false, columns, rows, rows == 1 ? columns : v.stride[1], v.stride[0]};
  } else if (fits(v.stride[1], rows, v.stride[2], columns)) {
    *to = {true, rows, columns, columns == 1 ? rows : v.stride[2], v.stride[0]};
  } else {
    return false;
  }
  return to->batch >= 0;
}

// `Api` has the library's types, its functions `f` and its constants.
template <class Api>
struct Lt {
  struct Product {
    typename Api::Operation operation = nullptr;
    typename Api::Layout a = nullptr, b = nullptr, c = nullptr, out = nullptr;
    typename Api::Preference preference = nullptr;
    ~Product() {
      for (auto* layout : {a, b, c, out}) {
        if (layout) (void)Api::f.MatrixLayoutDestroy(layout);
      }
      if (preference) (void)Api::f.MatmulPreferenceDestroy(preference);
      if (operation) (void)Api::f.MatmulDescDestroy(operation);
    }
  };
  struct Plan {
    std::shared_ptr<Product> product;
    typename Api::Result chosen;
  };

  static auto handle(Status& status) { return handle_from<typename Api::Handle>(Api::f.Create, status); }

  template <class T>
  static auto set(typename Api::Operation operation, typename Api::Attribute attribute, T value) {
    return Api::f.MatmulDescSetAttribute(operation, attribute, &value, sizeof value);
  }

  static auto layout(typename Api::Layout* to, const Columns& m, int64_t batch, Status& status) {
    status(Api::f.MatrixLayoutCreate(to, Api::kFloat, static_cast<uint64_t>(m.rows), static_cast<uint64_t>(m.columns),
                                     m.leading));
    const int32_t count = static_cast<int32_t>(batch);
    if (status.error || batch == 1) return;
    status(Api::f.MatrixLayoutSetAttribute(*to, Api::kBatchCount, &count, sizeof count));
    status(Api::f.MatrixLayoutSetAttribute(*to, Api::kBatchStride, &m.batch, sizeof m.batch));
  }

  static const char* refused(const Problem& p, Columns* a, Columns* b, Columns* c, Columns* out) {
    if (p.activation != kNone && p.activation != kRelu && p.activation != kGeluTanh) return "no epilogue for it";
    if (p.scale.data) return "no scale in its epilogue";
    if (p.bias.data && p.bias.stride[0] != 1 && p.bias.shape[0] != 1) return "a bias with gaps";
    if (!as_columns(p.a, a) || !as_columns(p.b, b)) return "an operand without a dense axis";
    if (!as_columns(p.out, out) || out->turned) return "a result whose rows have gaps";
    if (p.residual.data && (!as_columns(p.residual, c) || c->turned)) return "a residual whose rows have gaps";
    return nullptr;
  }

  static std::vector<Way> prepare(const Problem& p, size_t most, std::string* text) {
    Columns a, b, c, out;
    if (const char* why = refused(p, &a, &b, &c, &out)) {
      *text = why;
      return {};
    }
    if (!p.residual.data) c = out;
    Status status;
    typename Api::Handle library = handle(status);
    auto product = std::make_shared<Product>();
    const int64_t batch = p.out.shape[0];
    if (!status.error) status(Api::f.MatmulDescCreate(&product->operation, Api::compute(p.precision), Api::kFloat));
    if (!status.error) {
      status(set(product->operation, Api::kTransA, b.turned ? Api::kTurned : Api::kPlain));  // sides change places
      status(set(product->operation, Api::kTransB, a.turned ? Api::kTurned : Api::kPlain));
      status(set(product->operation, Api::kEpilogue, Api::epilogue(p.activation, p.bias.data != nullptr)));
      if (p.bias.data) status(set(product->operation, Api::kBiasPointer, p.bias.data));
      layout(&product->a, b, batch, status);
      layout(&product->b, a, batch, status);
      layout(&product->c, c, batch, status);
      layout(&product->out, out, batch, status);
      status(Api::f.MatmulPreferenceCreate(&product->preference));
    }
    int found = 0;
    if (!status.error) {
      const uint64_t limit = kMaxWorkspace;
      status(Api::f.MatmulPreferenceSetAttribute(product->preference, Api::kMaxWorkspaceBytes, &limit, sizeof limit));
      Api::alignments(product->preference, p, [&](auto s) { status(s); });
    }
    std::vector<typename Api::Result> results(most);
    if (!status.error)
      status(Api::f.MatmulAlgoGetHeuristic(library, product->operation, product->a, product->b, product->c,
                                           product->out, product->preference, static_cast<int>(most), results.data(),
                                           &found));
    std::vector<Way> ways;
    for (int i = 0; i < found && !status.error; i++)
      ways.push_back({new Plan{product, results[i]}, results[i].workspaceSize});
    if (ways.empty()) *text = "it has no algorithm, status " + std::to_string(status.error);
    return ways;
  }

  static int run(void* made, const Problem& p, void* workspace, void* stream) {
    const Plan& plan = *static_cast<Plan*>(made);
    const Product& product = *plan.product;
    Status status;
    typename Api::Handle library = handle(status);
    if (p.bias.data) status(set(product.operation, Api::kBiasPointer, p.bias.data));
    if (status.error) return status.error;
    const float one = 1, beta = p.residual.data ? 1 : 0;
    const void* c = p.residual.data ? p.residual.data : p.out.data;
    return static_cast<int>(Api::f.Matmul(library, product.operation, &one, p.b.data, product.a, p.a.data, product.b,
                                          &beta, c, product.c, p.out.data, product.out, &plan.chosen.algo, workspace,
                                          plan.chosen.workspaceSize, static_cast<gpuStream_t>(stream)));
  }

  static void forget(void* plan) { delete static_cast<Plan*>(plan); }
};

}  // namespace needle::gpu::vendor
