//! Panics as values. The panic hook is wrapped once; it stays silent on a thread that is inside [`caught`].

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// On a thread that catches panics: what the last one said, and where.
    static LAST: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The result of `f`, or what its panic said.
pub(super) fn caught<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    static WRAP: Once = Once::new();
    WRAP.call_once(|| {
        let outer = take_hook();
        set_hook(Box::new(move |info| {
            let noted = LAST.with_borrow_mut(|last| match last {
                Some(text) => {
                    let place = info.location().map(|at| format!(" ({}:{})", at.file(), at.line()));
                    *text = format!("panicked: {}{}", message(info.payload()), place.unwrap_or_default());
                    true
                }
                None => false,
            });
            if !noted {
                outer(info);
            }
        }));
    });
    LAST.set(Some(String::new()));
    let result = catch_unwind(AssertUnwindSafe(f));
    let said = LAST.take().unwrap_or_default();
    result.map_err(|_| said)
}

fn message(payload: &(dyn std::any::Any + Send)) -> &str {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a message")
}
