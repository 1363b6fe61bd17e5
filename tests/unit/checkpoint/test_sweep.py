"""What deleting files gives back."""

import os

from zerort.checkpoint.files.sweep import freed_nbytes


def test_only_files_without_another_name_give_their_bytes_back(tmp_path):
    (tmp_path / "alone").write_bytes(bytes(100))
    (tmp_path / "shared").write_bytes(bytes(1000))
    os.link(tmp_path / "shared", tmp_path / "elsewhere")
    assert freed_nbytes(str(tmp_path), ["alone", "shared", "gone"]) == 100
    os.unlink(tmp_path / "elsewhere")
    assert freed_nbytes(str(tmp_path), ["alone", "shared", "gone"]) == 1100
