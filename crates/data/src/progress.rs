//! How far the reading of a large set has come.

use std::cell::RefCell;
use std::fmt;
use std::path::PathBuf;
use std::rc::Rc;

/// Bytes between two reports.
pub(crate) const STRIDE: u64 = 1 << 20;

/// How far the reading of a file or folder has come.
///
/// It prints as a line: `train.csv: 12 of 48 MiB`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// The file or folder.
    pub path: PathBuf,
    /// Bytes of the file that were read, or files of the folder that were found.
    pub done: u64,
    /// How many there are, where that is known: a folder is not counted beforehand.
    pub total: Option<u64>,
    /// Whether it is a folder, and files are counted.
    pub files: bool,
    /// Whether this is the last report about it.
    pub finished: bool,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.path.display())?;
        if self.files {
            return write!(f, "{} files", self.done);
        }
        match self.total {
            Some(total) => write!(f, "{} of {} MiB", self.done >> 20, total.div_ceil(1 << 20)),
            None => write!(f, "{} MiB", self.done >> 20),
        }
    }
}

type Show = Rc<dyn Fn(&Progress)>;

thread_local! {
    static SHOW: RefCell<Vec<Show>> = const { RefCell::new(Vec::new()) };
}

/// Runs `read` and calls `show` whenever a mebibyte more of a file, or a thousand files more of a folder, was read in it
/// by this thread, and at the end of each.
///
/// ```
/// use kiln_data::{Csv, with_progress};
///
/// # let path = std::env::temp_dir().join(format!("kiln-progress-{}.csv", std::process::id()));
/// # std::fs::write(&path, "a,b\n1,2\n").unwrap();
/// let table = with_progress(|progress| eprintln!("{progress}"), || Csv::open(&path))?;
/// # std::fs::remove_file(&path).unwrap();
/// # assert_eq!(table.rows(), 1);
/// # Ok::<(), kiln_data::DataError>(())
/// ```
pub fn with_progress<T>(show: impl Fn(&Progress) + 'static, read: impl FnOnce() -> T) -> T {
    struct Shown;
    impl Drop for Shown {
        fn drop(&mut self) {
            SHOW.with(|all| all.borrow_mut().pop());
        }
    }
    SHOW.with(|all| all.borrow_mut().push(Rc::new(show)));
    let _shown = Shown;
    read()
}

/// Tells whoever asked on this thread.
pub(crate) fn tell(progress: impl FnOnce() -> Progress) {
    if let Some(show) = SHOW.with(|all| all.borrow().last().cloned()) {
        show(&progress());
    }
}
