//! Bytes of a file or of memory, unpacked if they are gzip, with progress told and hostile compression refused.

use crate::progress::{Progress, STRIDE, tell};
use crate::{DataError, Fault};
use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// What compressed bytes may unpack to, beyond [`RATIO`] times their number.
const FREE: u64 = 64 << 20;
/// Real data is packed to a tenth, seldom to a fiftieth; what was made to fill memory, to a thousandth.
const RATIO: u64 = 100;

/// Where a data set's file is read from.
pub(crate) struct Input<'a> {
    path: PathBuf,
    bytes: Kind<'a>,
}

enum Kind<'a> {
    Plain(Counted<'a>),
    Packed { from: MultiGzDecoder<Counted<'a>>, out: u64 },
}

/// Bytes of a file or of memory, counted.
struct Counted<'a> {
    path: PathBuf,
    from: Box<dyn BufRead + 'a>,
    done: u64,
    told: u64,
    total: Option<u64>,
}

impl<'a> Input<'a> {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Input<'static>, DataError> {
        let opened = File::open(path).and_then(|file| {
            let about = file.metadata()?;
            // A folder opens, and fails at the first read, in words that do not say so.
            if about.is_dir() {
                return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder"));
            }
            Ok((about.is_file().then_some(about.len()), file))
        });
        let (total, file) = opened.map_err(|e| Fault::from(e).at(path))?;
        Input::new(path.into(), Box::new(BufReader::with_capacity(1 << 16, file)), total)
    }

    /// Bytes in memory.
    pub fn memory(bytes: &'a [u8]) -> Result<Input<'a>, DataError> {
        Input::new("memory".into(), Box::new(bytes), Some(bytes.len() as u64))
    }

    fn new(
        path: PathBuf,
        mut from: Box<dyn BufRead + 'a>,
        total: Option<u64>,
    ) -> Result<Input<'a>, DataError> {
        let packed = from.fill_buf().map_err(|e| Fault::from(e).at(&path))?.starts_with(&[0x1f, 0x8b]);
        let counted = Counted { path: path.clone(), from, done: 0, told: 0, total };
        let bytes = match packed {
            true => Kind::Packed { from: MultiGzDecoder::new(counted), out: 0 },
            false => Kind::Plain(counted),
        };
        Ok(Input { path, bytes })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is gzip.
    pub fn is_packed(&self) -> bool {
        matches!(self.bytes, Kind::Packed { .. })
    }

    /// Whether its length is known, so that it can be read again.
    pub fn is_file(&self) -> bool {
        self.counted().total.is_some()
    }

    /// Everything that is left. Memory grows with what is really there.
    pub fn rest(&mut self) -> Result<Vec<u8>, Fault> {
        let mut all = Vec::new();
        self.read_to_end(&mut all)?;
        Ok(all)
    }

    /// Exactly `want` bytes and then the end.
    pub fn content(&mut self, want: u64) -> Result<Vec<u8>, Fault> {
        let mut all = Vec::new();
        // One byte more tells of a longer file without reading the rest of it.
        self.by_ref().take(want.saturating_add(1)).read_to_end(&mut all)?;
        match all.len() as u64 {
            have if have == want => Ok(all),
            have => Err(Fault::Length { want, have }),
        }
    }

    fn counted(&self) -> &Counted<'a> {
        match &self.bytes {
            Kind::Plain(counted) => counted,
            Kind::Packed { from, .. } => from.get_ref(),
        }
    }
}

impl Read for Input<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.bytes {
            Kind::Plain(from) => from.read(into),
            Kind::Packed { from, out } => {
                let got = from.read(into)?;
                *out += got as u64;
                let packed = from.get_ref().done;
                let most = packed.saturating_mul(RATIO).saturating_add(FREE);
                if *out > most {
                    return Err(io::Error::other(Fault::Bomb { packed, most }));
                }
                Ok(got)
            }
        }
    }
}

impl Drop for Input<'_> {
    fn drop(&mut self) {
        let counted = self.counted();
        tell(|| counted.progress(true));
    }
}

impl Counted<'_> {
    fn progress(&self, finished: bool) -> Progress {
        Progress { path: self.path.clone(), done: self.done, total: self.total, files: false, finished }
    }
}

impl Read for Counted<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let got = self.from.read(into)?;
        self.count(got);
        Ok(got)
    }
}

impl BufRead for Counted<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.from.fill_buf()
    }

    fn consume(&mut self, bytes: usize) {
        self.from.consume(bytes);
        self.count(bytes);
    }
}

impl Counted<'_> {
    fn count(&mut self, bytes: usize) {
        self.done += bytes as u64;
        if self.done - self.told >= STRIDE {
            self.told = self.done;
            tell(|| self.progress(false));
        }
    }
}
