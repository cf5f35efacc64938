//! Where in the user's program an operation came from. Origins travel beside the stream, never in it.

use std::cell::{Cell, RefCell};
use std::panic::Location;
use std::sync::{Arc, Mutex};

/// The user's line, the layer scope, and whether the operation belongs to a backward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Origin {
    /// The line that called.
    pub line: &'static Location<'static>,
    /// The scope it was called in.
    pub scope: Scope,
    /// Whether it computes the gradient of what that line did.
    pub backward: bool,
}

impl Origin {
    /// The caller's line in the current scope.
    #[track_caller]
    pub fn here() -> Origin {
        Origin { line: Location::caller(), scope: SCOPE.get(), backward: false }
    }
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.backward {
            f.write_str("the backward of ")?;
        }
        write!(f, "{}:{}:{}", self.line.file(), self.line.line(), self.line.column())?;
        match self.scope.name() {
            Some(name) => write!(f, " in {name}"),
            None => Ok(()),
        }
    }
}

/// A named scope such as `blocks.3.attn`; scopes nest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Scope(u32);

static NAMES: Mutex<Vec<Arc<str>>> = Mutex::new(Vec::new());

thread_local! {
    static SCOPE: Cell<Scope> = const { Cell::new(Scope(0)) };
    /// Scopes that this thread entered: outer scope, name, scope.
    static ENTERED: RefCell<Vec<(Scope, Box<str>, Scope)>> = const { RefCell::new(Vec::new()) };
}

/// Scopes that a thread remembers; a model has a few for each layer.
const REMEMBERED: usize = 256;

impl Scope {
    /// Its name; nothing for the outermost.
    pub fn name(self) -> Option<Arc<str>> {
        let names = NAMES.lock().unwrap_or_else(|e| e.into_inner());
        (self.0 as usize).checked_sub(1).and_then(|i| names.get(i).cloned())
    }

    fn child(self, name: &str) -> Scope {
        let known = |entered: &RefCell<Vec<(Scope, Box<str>, Scope)>>| {
            entered.borrow().iter().find(|(outer, own, _)| *outer == self && **own == *name).map(|e| e.2)
        };
        if let Ok(Some(scope)) = ENTERED.try_with(known) {
            return scope;
        }
        let scope = self.find(name);
        let _ = ENTERED.try_with(|entered| {
            let mut entered = entered.borrow_mut();
            if entered.len() < REMEMBERED {
                entered.push((self, name.into(), scope));
            }
        });
        scope
    }

    fn find(self, name: &str) -> Scope {
        let full = self.name().map_or_else(|| name.to_string(), |outer| format!("{outer}.{name}"));
        let mut names = NAMES.lock().unwrap_or_else(|e| e.into_inner());
        let at = names.iter().position(|n| **n == *full).unwrap_or_else(|| {
            names.push(full.into());
            names.len() - 1
        });
        Scope(at as u32 + 1)
    }
}

/// Runs `f` with `name` appended to the scope of what it records, so that errors and traces name the layer.
pub fn scope<T>(name: &str, f: impl FnOnce() -> T) -> T {
    struct Restore(Scope);
    impl Drop for Restore {
        fn drop(&mut self) {
            SCOPE.set(self.0);
        }
    }
    let outer = SCOPE.get();
    let _restore = Restore(outer);
    SCOPE.set(outer.child(name));
    f()
}
