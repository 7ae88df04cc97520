"""What happens when stored bytes turn out damaged or gone."""

from __future__ import annotations

import logging
from pathlib import Path

from .errors import CorruptBlob, NotFound
from .meta import Meta
from .store import Store

_log = logging.getLogger(__name__)


def checked_path(digest: str, store: Store, meta: Meta) -> Path:
    """Return a file with the verified bytes of a blob.

    Damaged bytes are set aside first, and what was made of them is marked to be made again.

    Raises:
        NotFound: there never was such a blob.
        CorruptBlob: it is damaged, or recorded and gone.
    """
    try:
        return store.checked_path(digest)
    except NotFound as error:
        kind = meta.blob_kind(digest)
        if kind is None:
            raise
        failure = CorruptBlob(f"{kind} {digest} is recorded but gone from the store; it has to be made again")
        failure.__cause__ = error
    except CorruptBlob as error:
        store.quarantine(digest)
        failure = CorruptBlob(f"{error}; it was set aside and has to be made again")
        failure.__cause__ = error
    _log.error("%s", failure)
    meta.damaged(digest, store.put)
    raise failure
