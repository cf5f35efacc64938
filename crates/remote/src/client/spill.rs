//! Snapshots that are too large for memory: their values in files without a name, which are gone when nobody holds them,
//! and are read by the page when they are sent.

use kiln_device::{Bytes, Data, Host};
use kiln_ir::Id;
use memmap2::Mmap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Writes values to a file of their own and gives them back as they are there. It takes its time: not on a thread that
/// others wait for.
pub fn store(values: &[(Id, Data)]) -> io::Result<Vec<(Id, Data)>> {
    let file = unnamed()?;
    let mut to = BufWriter::new(&file);
    values.iter().try_for_each(|(_, data)| to.write_all(&data.bytes))?;
    to.flush()?;
    drop(to);
    // SAFETY: the file has no name and its only handle ends here, so that nobody can write to it or cut it.
    #[allow(unsafe_code)]
    let mapped = unsafe { Mmap::map(&file)? };
    let mapped: Arc<dyn Host> = Arc::new(Mapped(mapped));
    let mut at = 0;
    let place = |(id, data): &(Id, Data)| {
        let bytes = Bytes::shared(mapped.clone(), at, data.bytes.len());
        at += data.bytes.len();
        (*id, Data::new(data.meta, bytes))
    };
    Ok(values.iter().map(place).collect())
}

struct Mapped(Mmap);

impl Host for Mapped {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A file in `KILN_SPILL`, else where temporary files are, that only this process can reach.
fn unnamed() -> io::Result<File> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let folder = std::env::var_os("KILN_SPILL").map_or_else(std::env::temp_dir, PathBuf::from);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = folder.join(format!("kiln-spill-{}-{number}", std::process::id()));
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_ir::{DType, Meta};

    #[test]
    fn values_come_back_from_their_file() {
        let value = |n: usize| Data::new(Meta::new(DType::U8, [n]), Bytes::new(vec![n as u8; n]));
        let values: Vec<(Id, Data)> = [0, 3, 200].map(|n| (Id(n as u64), value(n))).into();
        for ((id, data), (at, stored)) in values.iter().zip(store(&values).unwrap()) {
            assert_eq!((*id, data.meta), (at, stored.meta));
            assert_eq!(*stored.bytes, *data.bytes);
        }
    }
}
