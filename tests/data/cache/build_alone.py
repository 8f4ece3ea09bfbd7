"""Opens the token cache of a file in a process of its own: `build_alone.py DATA FOLDER`."""

import sys
from pathlib import Path

from mtrain.data.cache.encoding_workers import EncodingJob
from mtrain.data.cache.opening import CacheOptions, token_cache
from mtrain.data.formats.record_files import record_files
from tests.data.cache.byte_encoder import ByteEncoder

if __name__ == "__main__":
    job = EncodingJob(tuple(record_files(sys.argv[1])), ByteEncoder)
    print(token_cache(job, "bytes", CacheOptions(Path(sys.argv[2]))).fingerprint)
