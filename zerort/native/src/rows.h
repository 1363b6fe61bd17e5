// Rows of a table by their numbers, and the updates of AdamW that they have missed (zerort/optim/late.py).
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim.h"

namespace zerort {

// Copy rows of `nbytes` each out of a table, or into it. Those that come later are asked for while one is copied:
// rows by chance are a miss of every cache each.
void take_rows(char* out, const char* table, const std::int64_t* rows, std::size_t count, std::size_t nbytes);
void put_rows(char* table, const char* values, const std::int64_t* rows, std::size_t count, std::size_t nbytes);

// AdamW (optim.h) over rows of a table where they lie; `grad` has a row for each.
template <typename T>
void adamw_rows(T* param, const T* grad, T* mean, T* square, const std::int64_t* rows, std::size_t count,
                std::size_t width, const AdamWScalars<T>& scalars);

constexpr std::size_t late_terms = 6;

// What missed updates do, by age: `ages` numbers of each kind, `late_terms` + 1 of them for the series.
struct LateNumbers {
  const double* decay;
  const double* mean;
  const double* square;
  const double* terms;
  std::size_t ages;
  double eps, error;
};

// Bring rows up to date in place. A row that needs more terms than there are stays as it is, and is marked.
template <typename T>
void late_adamw(T* param, T* mean, T* square, const std::int64_t* ages, std::uint8_t* left, std::size_t count,
                std::size_t width, const LateNumbers& numbers);

}  // namespace zerort
