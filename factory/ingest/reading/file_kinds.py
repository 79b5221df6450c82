"""Defines the meaning of each file suffix: text, code, and kinds that are not read, with advice on converting them.

The kind of a file is its last suffix, or for a compressed file the suffix before that. Some code files are known by their whole name (``Makefile``).
"""

from __future__ import annotations

from pathlib import PurePath

from kernels.contract.message import Message

COMPRESSIONS = {
    ".gz": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bz2",
    ".xz": "xz",
    ".lzma": "xz",
    ".lz4": "lz4",
}
TEXT = (".txt", ".text", ".md", ".markdown", ".mdx", ".rst", ".adoc", ".asciidoc", ".org", ".tex", ".textile", ".wiki")
# Each line has a family of languages, with the suffixes that the tools of these languages use.
_CODE = """
    .py .pyi .pyx .pxd .c .h .cc .cpp .cxx .c++ .hh .hpp .hxx .h++ .ipp .inl .tpp .cu .cuh .cl .m .mm .rs .go .zig .nim .d .v .sv .svh .vhd .vhdl
    .java .kt .kts .scala .sc .groovy .gradle .clj .cljs .cljc .edn .js .mjs .cjs .jsx .ts .mts .cts .tsx .vue .svelte .astro .coffee
    .cs .fs .fsi .fsx .vb .swift .dart .rb .erb .rake .gemspec .php .pl .pm .t .raku .lua .r .jl .f .for .f77 .f90 .f95 .f03 .f08 .pas .pp .ada .adb
    .ads .cob .cbl .hs .lhs .elm .purs .ml .mli .mll .mly .re .rei .ex .exs .erl .hrl .lisp .lsp .el .scm .ss .rkt .lean .agda .thy .idr
    .sh .bash .zsh .fish .ksh .csh .awk .sed .ps1 .psm1 .psd1 .bat .cmd .tcl .vim .nix .sql .psql .plsql .prql .graphql .gql .proto .thrift .capnp
    .toml .yaml .yml .ini .cfg .conf .properties .xml .xsd .xsl .xslt .css .scss .sass .less .styl .tf .tfvars .hcl .bzl .bazel .star .cmake
    .mk .mak .make .dockerfile .asm .s .ll .mlir .ptx .wat .wgsl .glsl .hlsl .vert .frag .comp .metal .sol .vy .move .cairo .gd .qml .bib .diff
    .patch .jinja .jinja2 .j2 .tmpl .mustache .hbs .ejs .pug .haml .slim .liquid .feature .robot .do .sas .stan .bas .applescript .ahk .gn .gni
"""
_CODE_NAMES = """
    Makefile GNUmakefile makefile Dockerfile Containerfile CMakeLists.txt Rakefile Gemfile Vagrantfile Jenkinsfile Justfile justfile BUILD WORKSPACE
    SConstruct SConscript meson.build go.mod Procfile Brewfile Kconfig
"""
CODE, CODE_NAMES = tuple(_CODE.split()), frozenset(_CODE_NAMES.split())

ARCHIVE_SUFFIXES = (".zip", ".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst")
_PACKED = (
    *ARCHIVE_SUFFIXES,
    ".7z",
    ".rar",
    ".jar",
    ".whl",
    ".egg",
    ".apk",
    ".iso",
    ".cab",
    ".ar",
    ".deb",
    ".rpm",
    ".cpio",
)
_CONVERSION_HINTS = {
    **dict.fromkeys(
        (".pdf", ".ps", ".djvu"),
        Message("reading.convert_pdf", "extract the text first, for example with pdftotext"),
    ),
    **dict.fromkeys(
        (".docx", ".doc", ".odt", ".rtf", ".epub", ".mobi", ".pptx", ".ppt", ".odp", ".pages", ".fb2"),
        Message(
            "reading.convert_office",
            "convert the file to text first, for example with 'pandoc FILE -t plain -o FILE.txt'",
        ),
    ),
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".numbers"), Message("reading.convert_sheet", "save the sheet as CSV")),
    **dict.fromkeys(
        (".db", ".sqlite", ".sqlite3", ".duckdb", ".mdb"),
        Message("reading.convert_database", "export the table as CSV or Parquet"),
    ),
    **dict.fromkeys(
        (".avro", ".orc", ".hdf5", ".h5", ".lance"),
        Message("reading.convert_columns", "save the data as Parquet"),
    ),
    **dict.fromkeys((".dta", ".sav", ".rds", ".rdata"), Message("reading.convert_statistics", "save the data as CSV")),
    **dict.fromkeys(
        (".pkl", ".pickle", ".pt", ".pth", ".npy", ".npz", ".bin", ".safetensors", ".joblib"),
        Message("reading.convert_arrays", "arrays and pickles are not text. Save the documents as JSON lines"),
    ),
    **dict.fromkeys(
        (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".svg", ".ico", ".heic"),
        Message("reading.convert_image", "an image has no text"),
    ),
    **dict.fromkeys(
        (".mp3", ".wav", ".flac", ".ogg", ".m4a", ".mp4", ".mkv", ".webm", ".avi", ".mov"),
        Message("reading.convert_sound", "transcribe the recording first"),
    ),
    **dict.fromkeys(
        (".br", ".z", ".lzo", ".sz", ".snappy"),
        Message("reading.convert_compression", "decompress the file, or compress it with gzip or zstd"),
    ),
    **dict.fromkeys(
        (".mbox", ".eml", ".msg", ".pst"), Message("reading.convert_mail", "save the messages as JSON lines")
    ),
    **dict.fromkeys(
        _PACKED[len(ARCHIVE_SUFFIXES) :],
        Message("reading.convert_archive", "unpack the archive first (only zip and tar archives can be read directly)"),
    ),
}


def detect_kind(name: str) -> tuple[str, str]:
    """Return (suffix of the content, compression or '') for a file's name. A code file that is known by its whole name has the suffix '.mk'.

    >>> [detect_kind(name) for name in ("a.jsonl.gz", "b.TGZ", "Makefile", "c.tar.zst", "d", "e.warc.wet.gz")]
    [('.jsonl', 'gzip'), ('.tar', 'gzip'), ('.mk', ''), ('.tar', 'zstd'), ('', ''), ('.wet', 'gzip')]
    """
    path = PurePath(name)
    if path.name in CODE_NAMES:
        return ".mk", ""
    suffixes = [suffix.lower() for suffix in path.suffixes] or [""]
    short = {".tgz": "gzip", ".tbz": "bz2", ".tbz2": "bz2", ".txz": "xz", ".tzst": "zstd"}
    if suffixes[-1] in short:
        return ".tar", short[suffixes[-1]]
    compression = COMPRESSIONS.get(suffixes[-1], "")
    return ((suffixes[:-1] or [""])[-1] if compression else suffixes[-1]), compression


def is_archive(name: str) -> bool:
    """
    >>> is_archive("a.tar.gz"), is_archive("a.rar"), is_archive("a.gz")
    (True, True, False)
    """
    return detect_kind(name)[0] in _PACKED


def find_conversion_hint(name: str) -> Message | None:
    """Return how to convert a file that cannot be read, or None for an unknown kind.

    >>> find_conversion_hint("a.pdf"), find_conversion_hint("b.unheard")
    ('extract the text first, for example with pdftotext', None)
    """
    return _CONVERSION_HINTS.get(PurePath(name).suffix.lower()) or _CONVERSION_HINTS.get(detect_kind(name)[0])
