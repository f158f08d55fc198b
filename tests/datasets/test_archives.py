"""Archives that try to get out of their folder, to link, to swell or to end early; and honest ones."""

import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from mutirao.datasets import download as archives
from mutirao.datasets.download import unpack_archive
from mutirao.errors import ConfigError
from shops import zipped


def taped(path: Path, files: dict[str, bytes], *others: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for info in others:
            archive.addfile(info)
    return path


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_only_what_is_inside_is_taken_without_what_is_left_out(tmp_path: Path) -> None:
    archive = zipped(
        tmp_path / "a.zip",
        {
            "smear/New Database Pictures/light/1.BMP": b"one",
            "smear/New Database Pictures/light/1-D.BMP": b"mask",
            "smear/read me.txt": b"words",
        },
    )
    unpack_archive(archive, tmp_path / "out", "new database pictures", "*-d.bmp")
    assert content_of(tmp_path / "out") == {"light/1.BMP": b"one"}
    with pytest.raises(ConfigError, match=r"a\.zip has nothing in a folder 'elsewhere'"):
        unpack_archive(archive, tmp_path / "out", "elsewhere")


def test_a_tape_archive_is_taken_apart(tmp_path: Path) -> None:
    archive = taped(tmp_path / "a.tar.gz", {"set/train.bin": b"12", "set/deep/test.bin": b""})
    unpack_archive(archive, tmp_path / "out", "set")
    assert content_of(tmp_path / "out") == {"deep/test.bin": b"", "train.bin": b"12"}


@pytest.mark.parametrize("name", ["../out.txt", "a/../../out.txt", "/etc/out.txt", "..\\out.txt", "C:/out.txt"])
@pytest.mark.parametrize("make", [zipped, taped])
def test_nothing_is_written_outside_the_folder(tmp_path: Path, name: str, make: object) -> None:
    assert callable(make)
    archive = make(tmp_path / ("a.zip" if make is zipped else "a.tar.gz"), {name: b"evil"})
    with pytest.raises(ConfigError, match=r"outside its folder: refused"):
        unpack_archive(archive, tmp_path / "in" / "out")
    assert [p.name for p in tmp_path.rglob("out.txt")] == []


def test_links_and_devices_are_refused(tmp_path: Path) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
        info = tarfile.TarInfo("link")
        info.type, info.linkname = kind, "/etc/passwd"
        with pytest.raises(ConfigError, match=r"a link or a device in it \('link'\): refused"):
            unpack_archive(taped(tmp_path / "a.tar.gz", {}, info), tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(ConfigError, match="has a link in it"):
        unpack_archive(tmp_path / "a.zip", tmp_path / "out")


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="more than is plausible"):
        unpack_archive(zipped(tmp_path / "a.zip", {"zeros": bytes(10_000_000)}), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(archives, "MAX_FILES", 3)
    with pytest.raises(ConfigError, match="more than is plausible"):
        unpack_archive(zipped(tmp_path / "b.zip", {f"f{i}": os.urandom(9) for i in range(4)}), tmp_path / "out")


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz"])
def test_a_damaged_archive_is_told_in_one_line(tmp_path: Path, name: str) -> None:
    make = zipped if name == "a.zip" else taped
    whole = make(tmp_path / name, {"one": os.urandom(50_000)}).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"cannot be unpacked|too early"):
        unpack_archive(tmp_path / name, tmp_path / "out")
    (tmp_path / name).write_bytes(b"<html>not found</html>")
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        unpack_archive(tmp_path / name, tmp_path / "out")


def test_a_7z_archive_needs_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, tools = tmp_path / "a.7z", tmp_path / "tools"
    archive.write_bytes(b"seven")
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    with pytest.raises(ConfigError, match=r"checksum is right, but unpacking it needs 7-Zip \(7z\) or bsdtar"):
        unpack_archive(archive, tmp_path / "out")
    (tools / "7zz").write_text('#!/bin/sh\necho "$1 $4" > said\n')  # as the real one is called: x, then the archive
    (tools / "7zz").chmod(0o755)
    unpack_archive(archive, tmp_path / "out")
    assert (tmp_path / "out" / "said").read_text() == f"x {archive}\n"
    (tools / "7zz").write_text("#!/bin/sh\necho no room >&2\nexit 2\n")
    with pytest.raises(ConfigError, match="cannot be unpacked: no room"):
        unpack_archive(archive, tmp_path / "out")
    (tools / "7zz").write_text("#!/bin/sh\n/bin/ln -s /etc/passwd link\n")
    with pytest.raises(ConfigError, match="has a link in it"):
        unpack_archive(archive, tmp_path / "out")
