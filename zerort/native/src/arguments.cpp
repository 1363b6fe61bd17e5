#include "arguments.h"

namespace zerort {
namespace {

PyObject* dtype_codes = nullptr;  // {numpy.dtype: int}, set at import and kept until the process ends
PyObject* dtype_name = nullptr;   // "dtype", interned: looked up for every array of every call

}  // namespace

void register_dtypes(nanobind::dict codes) {
  dtype_name = PyUnicode_InternFromString("dtype");
  dtype_codes = codes.release().ptr();
}

bool Argument::open_bytes(nanobind::handle object, Access access) {
  const int flags = PyBUF_ND | (access == Access::write ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(object.ptr(), &view_, flags) == 0) return true;
  PyErr_Clear();
  view_.obj = nullptr;
  return false;
}

bool Argument::open(nanobind::handle object, Access access) {
  if (dtype_codes == nullptr || !open_bytes(object, access) || view_.ndim != 1) return false;
  PyObject* dtype = PyObject_GetAttr(object.ptr(), dtype_name);
  PyObject* code = dtype == nullptr ? nullptr : PyDict_GetItemWithError(dtype_codes, dtype);
  Py_XDECREF(dtype);
  if (code == nullptr) {
    PyErr_Clear();
    return false;
  }
  dtype_ = static_cast<Dtype>(PyLong_AsLong(code));
  return reinterpret_cast<std::uintptr_t>(data()) % itemsize(dtype_) == 0;
}

}  // namespace zerort
