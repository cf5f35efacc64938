use kiln_nn::LoadError;
use std::path::{Path, PathBuf};

/// Why a model file cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The system says so.
    #[error("{}: {source}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The file does not keep to its format, or is cut.
    #[error("{}: {reason}", path.display())]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// Where it differs.
        reason: String,
    },
    /// The file may be right, but Kiln cannot do it.
    #[error("{}: {reason}", path.display())]
    Unsupported {
        /// Which file.
        path: PathBuf,
        /// What it would take.
        reason: String,
    },
    /// There is no tensor of that name.
    #[error("{}: it has no tensor named {name}{}", path.display(), near(nearest))]
    Missing {
        /// Which file.
        path: PathBuf,
        /// What was asked for.
        name: String,
        /// The name most like it.
        nearest: Option<String>,
    },
    /// A rule for names is no regular expression.
    #[error("rename: `{rule}`: {reason}")]
    Rule {
        /// The rule.
        rule: String,
        /// Where it is wrong.
        reason: String,
    },
    /// What was read does not fit the model, which is as it was.
    #[error("{}: {source}", path.display())]
    Load {
        /// Which file.
        path: PathBuf,
        /// What does not fit.
        source: LoadError,
    },
    /// A tensor could not be brought to a device, or read from it.
    #[error(transparent)]
    Device(#[from] kiln_tensor::Error),
}

fn near(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or(String::new(), |name| format!("; there is {name}"))
}

/// Results here.
pub type Result<T> = std::result::Result<T, StoreError>;

impl StoreError {
    pub(crate) fn damaged(path: &Path, reason: impl ToString) -> StoreError {
        StoreError::Damaged { path: path.into(), reason: reason.to_string() }
    }

    pub(crate) fn unsupported(path: &Path, reason: impl ToString) -> StoreError {
        StoreError::Unsupported { path: path.into(), reason: reason.to_string() }
    }

    /// For `map_err` of what the system refuses. A file that ends too early is damaged.
    pub(crate) fn file(path: &Path) -> impl Fn(std::io::Error) -> StoreError {
        move |source| match source.kind() {
            std::io::ErrorKind::UnexpectedEof => StoreError::damaged(path, "it ends too early"),
            std::io::ErrorKind::InvalidData => StoreError::damaged(path, source),
            _ => StoreError::File { path: path.into(), source },
        }
    }
}
