"""Files of every store that Beam knows: functions of ``storage`` for their paths.

Errors are OSErrors that quote only the path and a type.

References:
  Strong consistency after writes: Amazon S3 since 2020-12, Google Cloud Storage.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

from apache_beam.io.aws.s3io import S3IO, S3Uploader, parse_s3_path
from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.options.value_provider import RuntimeValueProvider
from apache_beam.utils import retry
from apache_beam.utils.secret import GcpSecret

from accounting.core.validation import InputError
from pipelines.files.paths import SCHEME, WILDCARDS, absolute, hidden_path

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Extra of Beam that a scheme needs.
_EXTRAS = {"s3": "aws", "gs": "gcp", "hdfs": "hadoop", "azfs": "azure"}
#: Bytes per write: for each, Beam copies all that it holds, and S3 stores a part.
_PART_BYTES = 8 << 20
#: Beam would choose a compression by the suffix of a name.
_AS_IT_IS = CompressionTypes.UNCOMPRESSED
#: Retries of what a half-done job needs: about a minute.
_MOST_RETRIES = 6
#: Seconds that a bucket has for its first answer.
_ANSWER_SECONDS = 15
#: HTTP status of a busy store: request timeout, too many requests.
_LATER = (408, 429)
#: HTTP status of S3 where another writer was first, or is at it.
_TAKEN = (409, 412)

# Beam's warnings about retries quote addresses.
logging.getLogger(retry.__name__).setLevel(logging.ERROR)


def use_options(options: PipelineOptions) -> None:
    """Lets the stores use Beam's ``options``, such as ``--s3_endpoint_url``."""
    FileSystems.set_options(options)
    _check_bucket.cache_clear()


def file_system(path: str) -> Any:
    """Returns Beam's file system for a path.

    Raises:
      InputError: its client is not installed, or a bucket of S3 does not answer.
    """
    # A worker's options arrive as runtime options and must win.
    if not (FileSystems._pipeline_options or RuntimeValueProvider.runtime_options):
        FileSystems.set_options(PipelineOptions([]))
    try:
        files = FileSystems.get_filesystem(path)
    except ValueError:
        scheme = path.split(SCHEME)[0]
        extra = _EXTRAS.get(scheme)
        remedy = f"pip install 'apache-beam[{extra}]'" if extra else "see Beam's list"
        raise InputError(
            f"Expected {scheme}:// of {path} to be a file system that Beam has here: "
            f"{remedy}."
        ) from None
    if files.scheme() == "s3":
        _check_bucket(path.split(SCHEME)[1].split("/")[0])
    return files


@functools.cache
def _check_bucket(bucket: str) -> None:
    """Asks a bucket of S3 once: Beam would ask for minutes, and say nothing.

    Raises:
      InputError: it does not answer, there are no credentials, or no such bucket.
    """
    answers: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def ask() -> None:
        files = FileSystems.get_filesystem(f"s3://{bucket}/")
        try:
            answers.put(_s3_client(files).head_bucket(Bucket=bucket) and None)
        except Exception as error:
            answers.put(error)

    threading.Thread(target=ask, daemon=True).start()  # it may wait for minutes
    try:
        error = answers.get(timeout=_ANSWER_SECONDS)
    except queue.Empty:
        error = TimeoutError()
    if error is None or (_response(error) and _code(error) != "404"):
        return  # such as no permission to ask this
    why = " ".join(filter(None, (type(error).__name__, _code(error))))
    raise InputError(
        f"Expected s3://{bucket} to answer within {_ANSWER_SECONDS} s: {why}. Check "
        "its name, credentials and endpoint (AWS_ENDPOINT_URL, --s3_endpoint_url)."
    )


@contextlib.contextmanager
def plain_errors(path: str) -> Iterator[None]:
    """Turns an error of a store's client into an OSError that quotes only the path."""
    try:
        yield
    except (InputError, FileNotFoundError):
        raise
    except Exception as error:
        answer = dict.fromkeys((type(error).__name__, _code(error)))
        reason = f"the store answered {' '.join(answer)}".strip()
        number = errno.EIO if _may_pass(error) else errno.EACCES
        raise OSError(number, reason, path) from None


def _code(error: Exception) -> str:
    """Returns the error code of a client, such as 403 or AccessDenied; else empty."""
    code = getattr(error, "code", None) or _response(error).get("Error", {}).get("Code")
    text = str(code or "")
    return text if text.isalnum() and len(text) < 40 else ""


def _response(error: Exception) -> dict[str, Any]:
    """Returns the answer that an error of S3's client holds; else empty."""
    response = getattr(error, "response", None)
    return response if isinstance(response, dict) else {}


def read_secret(version: str) -> bytes:
    """Returns a version of a secret of Google's Secret Manager.  Sensitive."""
    with plain_errors(version):
        return GcpSecret(version).get_secret_bytes()


def open_file(path: str) -> IO[bytes]:
    """Returns an object open for reading, with ``seek``."""
    with plain_errors(path):
        try:
            return file_system(path).open(path, compression_type=_AS_IT_IS)
        except Exception:
            if not file_system(path).exists(path):
                raise FileNotFoundError(errno.ENOENT, "no such object", path) from None
            raise


def _may_pass(error: Exception) -> bool:
    """Whether a retry may succeed: the store did not refuse the request."""
    if isinstance(error, (InputError, FileNotFoundError, PermissionError)):
        return False
    status = _status(error)
    return not isinstance(status, int) or status >= 500 or status in _LATER


def _status(error: Exception) -> Any:
    """Returns the HTTP status that an error of a client holds; else None."""
    metadata = _response(error).get("ResponseMetadata", {})
    return metadata.get("HTTPStatusCode", getattr(error, "code", None))  # of Google


def _say_nothing(*_: object) -> None:
    """Replaces a logger: messages of a client may quote addresses and credentials."""


def _repeated(ask: _Function, most: int) -> _Function:
    """Returns ``ask`` with at most ``most`` retries, after 1, 2, 4, ... seconds.

    The client of a store also retries, for some seconds each time.
    """
    return retry.with_exponential_backoff(
        num_retries=most,
        initial_delay_secs=1,
        retry_filter=_may_pass,
        logger=_say_nothing,
    )(ask)


def read_bytes(path: str, *, patient: bool = False) -> bytes:
    """Returns the contents of an object: see ``storage.read_bytes``."""
    files = file_system(path)
    # Beam would retry for ten minutes, and log addresses.
    get = _s3_get(files) if files.scheme() == "s3" else _get
    most = _MOST_RETRIES if patient else 1
    with plain_errors(path):
        try:
            return _repeated(get, most)(path)
        except Exception as error:
            if _code(error) == "NoSuchKey":
                raise FileNotFoundError(errno.ENOENT, "no such object", path) from None
            raise


def _get(path: str) -> bytes:
    with open_file(path) as file:
        return file.read()


def range_reader(folder: str) -> Callable[[str, int, int], bytes]:
    """Returns what ``storage.range_reader`` returns."""
    files = file_system(folder)
    readers = {"s3": _s3_reader, "gs": _gs_reader}
    get = readers.get(files.scheme(), _any_reader)(files)
    repeated = _repeated(get, _MOST_RETRIES)

    def read(path: str, start: int, size: int) -> bytes:
        with plain_errors(path):
            data = repeated(path, start, size)
        if len(data) != size:
            raise OSError(errno.EIO, f"bytes are missing at {start}", path)
        return data

    return read


def _any_reader(files: Any) -> Callable[[str, int, int], bytes]:
    del files

    def get(path: str, start: int, size: int) -> bytes:
        with open_file(path) as file:
            file.seek(start)
            return file.read(size)

    return get


def _gs_reader(files: Any) -> Callable[[str, int, int], bytes]:
    """Reads ranges by one request each: Beam would fetch at least 16 MiB."""
    client = files._gcsIO().client

    def get(path: str, start: int, size: int) -> bytes:
        bucket, name = path.split(SCHEME)[1].split("/", 1)
        blob = client.bucket(bucket).blob(name)
        last = start + size - 1
        return blob.download_as_bytes(start=start, end=last, raw_download=True)

    return get


def _s3_client(files: Any) -> Any:
    """Returns Beam's client for S3, with its options; thread-safe."""
    return S3IO(options=files._options).client.client


def _s3_reader(files: Any) -> Callable[[str, int, int], bytes]:
    """Reads ranges by one request each.

    Beam would fetch the rest of the object, and make a client for each, in 0.1 s.
    """
    ask = _s3_get(files)

    def get(path: str, start: int, size: int) -> bytes:
        return ask(path, Range=f"bytes={start}-{start + size - 1}")

    return get


def _s3_get(files: Any) -> Callable[..., bytes]:
    client = _s3_client(files)

    def get(path: str, **more: str) -> bytes:
        bucket, key = parse_s3_path(path)
        return client.get_object(Bucket=bucket, Key=key, **more)["Body"].read()

    return get


@contextlib.contextmanager
def new_file(path: str) -> Iterator[Callable[[bytes], None]]:
    """Writes an object or, in a store with folders, a temporary file and renames it."""
    with plain_errors(path):
        files = file_system(path)
        target = hidden_path(path) if files.has_dirs() else path
    with _create(files, target) as write:
        yield write
    if target == path:
        return
    with plain_errors(path):
        if files.exists(path):  # Hadoop's rename does not replace a file
            files.delete([path])
        files.rename([target], [path])


def create(path: str, data: bytes) -> bool:
    """Writes an object unless there is one: see ``storage.create``."""

    data = bytes(data)  # S3's client takes no view

    def write() -> bool:
        files = file_system(path)
        if files.scheme() == "s3":
            return _s3_create(files, path, data)
        if files.exists(path):
            return False
        with new_file(path) as write:
            write(data)
        return True

    with plain_errors(path):
        return _repeated(write, _MOST_RETRIES)()


def _s3_create(files: Any, path: str, data: bytes) -> bool:
    bucket, key = parse_s3_path(path)
    try:
        _s3_client(files).put_object(Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
    except Exception as error:
        if _status(error) in _TAKEN:
            return False
        raise
    return True


def copy_to_store(source: str, path: str) -> None:
    """Copies a file of this machine: see ``storage.copy_to_store``."""

    def copy() -> None:
        with open(source, "rb") as file, new_file(path) as write:
            while data := file.read(_PART_BYTES):
                write(data)

    _repeated(copy, _MOST_RETRIES)()


@contextlib.contextmanager
def _create(files: Any, path: str) -> Iterator[Callable[[bytes], None]]:
    held = bytearray()

    def flush() -> None:
        with plain_errors(path):
            file.write(bytes(held))
        held.clear()

    def write(data: bytes) -> None:
        held.extend(data)
        if len(held) >= _PART_BYTES:
            flush()

    with plain_errors(path):
        file = files.create(path, compression_type=_AS_IT_IS)
    try:
        yield write
        flush()
    except BaseException:
        # Closing, here or by the garbage collector, may publish the unfinished object.
        published = not _abort(file)
        for undo in (file.close, *([lambda: files.delete([path])] * published)):
            with contextlib.suppress(Exception):
                undo()
        raise
    with plain_errors(path):
        file.close()


def _abort(file: Any) -> bool:
    """Aborts an upload, so that closing does not publish it; returns whether it could.

    It can in S3: a complete object of another writer is neither replaced nor removed.
    """
    uploader: Any = getattr(getattr(file, "raw", None), "_uploader", None)
    if not isinstance(uploader, S3Uploader):
        return False
    vars(uploader)["finish"] = lambda: None  # which completes the upload
    with contextlib.suppress(Exception):
        uploader._client.client.abort_multipart_upload(
            Bucket=uploader._bucket, Key=uploader._name, UploadId=uploader.upload_id
        )
    return True


def exists(path: str) -> bool:
    """Whether there is an object at ``path``."""
    with plain_errors(path):
        return file_system(path).exists(path)


def is_folder(path: str) -> bool:
    """Whether ``path`` is a folder; in an object store, whether it is not an object."""
    with plain_errors(path):
        files = file_system(path)
        if path.endswith("/") or not files.exists(path):
            return not files.has_dirs() or files.exists(absolute(path))
    return files.has_dirs() and _children(path) is not None


def walk(
    folder: str, enter: Callable[[tuple[str, ...]], bool]
) -> Iterator[tuple[str, ...]]:
    """Yields the path of every file below a folder: see ``storage.walk``."""
    root = absolute(folder)
    if file_system(root).has_dirs():
        return _walk(root, _children(root) or [], (), enter)
    paths = (tuple(path.split("/")) for path in _listing(root))
    return (names for names in paths if names[-1])  # some tools make objects "folder/"


def _walk(
    folder: str,
    children: list[Any],
    above: tuple[str, ...],
    enter: Callable[[tuple[str, ...]], bool],
) -> Iterator[tuple[str, ...]]:
    for metadata in children:
        path = metadata.path
        names = (*above, path.removeprefix(f"{folder}/"))
        # A folder has 0 bytes, and so has an empty file.
        below = None if metadata.size_in_bytes else _children(path)
        if below is None:
            yield names
        elif enter(names):
            yield from _walk(path, below, names, enter)


def _children(folder: str) -> list[Any] | None:
    """Returns the entries of a folder in a store with folders; None for a file."""
    if any(character in folder for character in WILDCARDS):
        raise OSError(errno.EINVAL, "its name holds a wildcard", folder)
    try:
        with plain_errors(folder):
            return file_system(folder).match([f"{folder}/*"])[0].metadata_list
    except OSError:
        open_file(folder).close()  # raises for a folder that cannot be listed
        return None


def _listing(folder: str) -> dict[str, int]:
    """Returns path below a folder -> bytes; at any depth without folders."""
    with plain_errors(folder):
        files = file_system(folder)
        if files.has_dirs() and not files.exists(folder):
            return {}
        found = files.match([f"{folder}/**"])[0].metadata_list
    return {
        metadata.path.removeprefix(f"{folder}/"): metadata.size_in_bytes
        for metadata in found
    }


def names(folder: str) -> set[str]:
    """Returns the names directly in a folder."""
    return {path.split("/")[0] for path in _listing(absolute(folder))}


def sizes(folder: str) -> dict[str, int]:
    """Returns name -> bytes of the files directly in a folder."""
    listing = _listing(absolute(folder))
    return {path: size for path, size in listing.items() if "/" not in path}


def size(path: str) -> int | None:
    """Returns the bytes of a file, or None if there is none."""
    with plain_errors(path):
        files = file_system(path)
        return files.size(path) if files.exists(path) else None


def make_folder(path: str) -> bool:
    """Makes a folder, if the store has folders, and returns whether it is new."""
    with plain_errors(path):
        files = file_system(path)
        new = files.has_dirs() and not files.exists(path)
        if new:
            files.mkdirs(path)
        return new


def delete(path: str) -> None:
    """Removes a file, if there is one."""
    with plain_errors(path):
        files = file_system(path)
        if files.exists(path):
            files.delete([path])


def delete_folder(path: str) -> None:
    """Removes a folder with its contents, if there is one."""
    name = absolute(path)
    with plain_errors(name):
        files = file_system(name)
        if not files.has_dirs():
            objects = [f"{name}/{path}" for path in _listing(name)]
            if objects:
                files.delete(objects)
            if files.scheme() == "s3":
                _abort_uploads(files, name)
        elif files.exists(name):
            files.delete([name])


def _abort_uploads(files: Any, folder: str) -> None:
    """Removes the unfinished uploads of killed writers, which no listing shows."""
    client, (bucket, prefix) = _s3_client(files), parse_s3_path(f"{folder}/")
    with contextlib.suppress(Exception):  # it needs a permission that jobs do not
        found = client.get_paginator("list_multipart_uploads").paginate(
            Bucket=bucket, Prefix=prefix
        )
        for upload in filter(None, found.search("Uploads[]")):
            client.abort_multipart_upload(
                Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
