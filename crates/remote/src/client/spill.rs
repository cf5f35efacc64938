//! Snapshots that are too large for memory: their values in files that no other process opens and that are gone when
//! nobody holds them, read piece by piece when they are sent. A piece that cannot be read is an error of the device.

use crate::protocol::link::{Part, Stored};
use kiln_device::Data;
use kiln_ir::{Id, Meta};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// A value in a file.
#[derive(Clone, Debug)]
pub struct Spilled {
    /// Its dtype and shape.
    pub meta: Meta,
    /// Its content.
    pub part: Part,
}

/// Writes values to a file of their own and tells where they are. It takes its time: not on a thread that others wait
/// for.
pub fn store(values: &[(Id, Data)]) -> io::Result<Vec<(Id, Spilled)>> {
    let file = Spill::create()?;
    {
        let file = file.lock();
        let mut to = BufWriter::new(&*file);
        values.iter().try_for_each(|(_, data)| to.write_all(&data.bytes))?;
        to.flush()?;
    }
    let stored: Arc<dyn Stored> = Arc::new(file);
    let mut from = 0;
    let place = |(id, data): &(Id, Data)| {
        let (at, len) = (from, data.bytes.len());
        from += len as u64;
        (*id, Spilled { meta: data.meta, part: Part { stored: stored.clone(), at, len } })
    };
    Ok(values.iter().map(place).collect())
}

/// A file in `KILN_SPILL`, else where temporary files are.
struct Spill {
    file: Mutex<File>,
    /// Where it still has a name, to be removed at the end: on Unix it has none as soon as it is open.
    named: Option<PathBuf>,
}

impl Spill {
    fn create() -> io::Result<Spill> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let folder = kiln_env::SPILL.get().unwrap_or_else(std::env::temp_dir);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("kiln-spill-{}-{number}", std::process::id()));
        let file = private(&path)?;
        let named = match std::fs::remove_file(&path) {
            Ok(()) if cfg!(unix) => None,
            _ => Some(path),
        };
        Ok(Spill { file: Mutex::new(file), named })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, File> {
        self.file.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// A new file, for this user only where the system has such a thing.
fn private(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

impl Stored for Spill {
    fn read(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut content = vec![0; len];
        let mut file = self.lock();
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(&mut content)?;
        Ok(content)
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        if let Some(path) = &self.named {
            let _ = std::fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::message::{kind, stored_pieces};
    use kiln_device::Bytes;
    use kiln_ir::DType;

    fn value(n: usize) -> Data {
        let bytes: Vec<u8> = (0..n).map(|i| (i * 7 + n) as u8).collect();
        Data::new(Meta::new(DType::U8, [n]), Bytes::new(bytes))
    }

    #[test]
    fn values_come_back_from_their_file() {
        let values: Vec<(Id, Data)> = [0, 3, 700_000].map(|n| (Id(n as u64), value(n))).into();
        for ((id, data), (at, spilled)) in values.iter().zip(store(&values).unwrap()) {
            assert_eq!((*id, data.meta), (at, spilled.meta));
            assert_eq!(spilled.part.read().unwrap(), *data.bytes);
            // In frames, each read by itself.
            let pieces: Vec<_> = stored_pieces(9, &spilled.part).collect();
            assert_eq!(pieces.len(), data.bytes.len().div_ceil(256 << 10));
            let read = |(kind, body): &(u8, crate::protocol::Body)| {
                assert_eq!((*kind, body.data.is_none()), (kind::PIECE, true));
                body.later.as_ref().unwrap().read().unwrap()
            };
            assert_eq!(pieces.iter().flat_map(read).collect::<Vec<u8>>(), *data.bytes);
        }
    }

    #[test]
    fn what_cannot_be_read_is_an_error() {
        let file = Spill::create().unwrap();
        file.lock().write_all(&[7; 100]).unwrap();
        let spill = Arc::new(file);
        let part = Part { stored: spill.clone(), at: 10, len: 50 };
        assert_eq!(part.read().unwrap(), [7; 50]);
        spill.lock().set_len(20).unwrap();
        assert!(part.read().is_err(), "the file was cut");
    }
}
