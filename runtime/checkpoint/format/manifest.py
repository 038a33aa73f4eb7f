"""The manifests of a checkpoint, which list its files and the hash of every block.

One manifest per rank lists the files that the rank wrote. The global manifest lists the ranks' manifests and their
hashes. Each manifest is a JSON file with a hash of its content. `parse` accepts only the exact bytes that `dump`
writes, so that it detects every altered byte.
"""

import json
from pathlib import PurePosixPath
from typing import Annotated, Any, Self, TypeVar

import xxhash
from ebbtide.runtime.checkpoint.errors import ManifestError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

FORMAT = 1
GLOBAL_NAME = "ebbtide.json"
RANKS_FOLDER = "ebbtide"
# A larger file is no manifest of ours. With 4 MiB blocks, this is enough for about 30 TB per rank.
MAX_BYTES = 256 * 2**20


def block_hash(data: Any) -> str:
    """Return the xxh3-128 hash of a buffer, 32 hexadecimal digits. It finds damage but is not cryptographic."""
    return xxhash.xxh3_128_hexdigest(data)


def rank_manifest_name(rank: int) -> str:
    """Return the path of a rank's manifest inside the checkpoint."""
    return f"{RANKS_FOLDER}/rank_{rank:05d}.json"


def stored_name(rank: int) -> str:
    """Return the path, inside a checkpoint, of the JSON file that says where a rank's optimizer state is on drives."""
    return f"{RANKS_FOLDER}/stored_{rank:05d}.json"


def _inside(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"each path in a manifest must name a file inside the checkpoint's folder, but got {path!r}")
    return path


Inside = Annotated[str, AfterValidator(_inside)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class Document(BaseModel):
    """A JSON document in a checkpoint or in a store of optimizer state. `dump` writes it, `parse` reads it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileRecord(Document):
    """A manifest's entry for one file: its length, and the hash of each of its blocks of ``block_bytes``, in order."""

    path: Inside
    size_bytes: int = Field(ge=0)
    block_bytes: int = Field(ge=1)
    hashes: list[Hash]

    @model_validator(mode="after")
    def _check(self) -> Self:
        blocks = -(-self.size_bytes // self.block_bytes)
        if len(self.hashes) != blocks:
            raise ValueError(
                f"the manifest's entry for {self.path} must have one hash per block, but has {len(self.hashes)} hashes "
                f"for {blocks} blocks"
            )
        return self


class RankManifest(Document):
    """A rank's manifest, which is its vote for the checkpoint's commit: every file listed here is on disk.

    Attributes:
        nonce: Identifier of the attempt to save. Votes of an earlier, abandoned attempt do not count.
        step: Number of optimizer steps done. It is equal in all manifests of a checkpoint.
    """

    format: int = Field(FORMAT, ge=1)
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    nonce: str
    tag: str
    step: int = Field(ge=0)
    plan: str = ""
    versions: dict[str, str]
    files: list[FileRecord]


class RankSeal(Document):
    path: Inside
    size_bytes: int = Field(ge=0)
    hash: Hash


class GlobalManifest(Document):
    """The global manifest of a checkpoint, which is written last. A folder that has one is a complete checkpoint.

    Attributes:
        sequence: Number of the checkpoint in its folder. The newest checkpoint has the highest number.
    """

    format: int = Field(FORMAT, ge=1)
    nonce: str
    tag: str
    step: int = Field(ge=0)
    sequence: int = Field(ge=1)
    world_size: int = Field(ge=1)
    committed_unix_s: float
    plan: str = ""
    versions: dict[str, str]
    payload_bytes: int = Field(ge=0)
    ranks: list[RankSeal]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.ranks) != self.world_size:
            raise ValueError(
                f"the manifest must list as many ranks as its world_size, which is {self.world_size}, but lists "
                f"{len(self.ranks)} ranks"
            )
        return self


PageT = TypeVar("PageT", bound=Document)


def dump(page: Document) -> bytes:
    """Return the bytes of the file for a manifest or another `Document`: the JSON text, then its hash."""
    body = page.model_dump_json()
    return f'{{"body":{body},"xxh3_128":"{block_hash(body.encode())}"}}\n'.encode()


def parse(data: bytes, kind: type[PageT], name: str) -> PageT:
    """Parse a manifest or another `Document` (a JSON document) from the bytes that `dump` wrote.

    Raises:
        ManifestError: The bytes are incomplete, altered, of a newer format, or not a `Document` of this kind.
    """
    if len(data) > MAX_BYTES:
        raise ManifestError(f"{name} must be at most {MAX_BYTES} bytes, but has {len(data)}")
    try:
        raw = json.loads(data)
        body, stated_hash = raw["body"], raw["xxh3_128"]
        version = body.get("format", FORMAT) if isinstance(body, dict) else FORMAT
        if isinstance(version, int) and version > FORMAT:
            raise ManifestError(
                f"{name} has manifest format {version}, but this ebbtide reads formats up to {FORMAT}: upgrade ebbtide"
            )
        page = kind.model_validate_json(json.dumps(body))
    except ManifestError:
        raise
    except ValidationError as error:
        raise ManifestError(
            f"{name} must be a JSON file that ebbtide wrote for a checkpoint or for optimizer state on a drive, but "
            f"has wrong fields: {error.errors()[0]['msg']}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        kind_of = type(error).__name__
        raise ManifestError(f"{name} is truncated or not a manifest ({kind_of})") from None
    if dump(page) != data:
        raise ManifestError(f"{name} was altered: its bytes do not match its hash {stated_hash!r}")
    return page
