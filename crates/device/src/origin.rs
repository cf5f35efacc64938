//! Where in the user's program an operation came from. Origins travel beside the stream, never in it.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
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
    /// The method that was called there, where that is not the operation itself; else empty.
    pub method: &'static str,
}

impl Origin {
    /// The caller's line in the current scope.
    #[track_caller]
    pub fn here() -> Origin {
        Origin {
            line: LINE.get().unwrap_or(Location::caller()),
            scope: SCOPE.get(),
            backward: false,
            method: METHOD.get(),
        }
    }

    /// Has everything that this thread records told as this line's until the guard is dropped: what is called through a
    /// pointer does not know its caller. Inside another such guard it does nothing.
    pub fn hold(line: &'static Location<'static>) -> LineGuard {
        let outermost = LINE.get().is_none();
        if outermost {
            LINE.set(Some(line));
        }
        LineGuard { outermost, thread: PhantomData }
    }

    /// What a message calls operation `op`: the method that the user called, if that is known.
    pub fn name<'a>(&self, op: &'a str) -> &'a str {
        if self.method.is_empty() || self.backward { op } else { self.method }
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
    static LINE: Cell<Option<&'static Location<'static>>> = const { Cell::new(None) };
    static METHOD: Cell<&'static str> = const { Cell::new("") };
    /// Scopes that this thread entered: outer scope, name, scope.
    static ENTERED: RefCell<Vec<(Scope, Box<str>, Scope)>> = const { RefCell::new(Vec::new()) };
}

/// Scopes that a thread remembers; a model has a few for each layer.
const REMEMBERED: usize = 256;

impl Scope {
    /// Appends `name` to the scope of what this thread records until the guard is dropped. Unlike the closure of
    /// [`scope`], a guard keeps `#[track_caller]`: what is called below it still gets the caller's line.
    pub fn enter(name: &str) -> ScopeGuard {
        let outer = SCOPE.get();
        SCOPE.set(outer.child(name));
        ScopeGuard { outer, thread: PhantomData }
    }

    /// Its name; `None` for the outermost.
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

/// Leaves a scope when it is dropped.
#[must_use = "the scope ends when the guard is dropped"]
pub struct ScopeGuard {
    outer: Scope,
    /// It belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl Drop for ScopeGuard {
    fn drop(&mut self) {
        SCOPE.set(self.outer);
    }
}

/// Ends what [`Origin::hold`] began when it is dropped.
#[must_use = "the line is held until the guard is dropped"]
pub struct LineGuard {
    outermost: bool,
    /// It belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl Drop for LineGuard {
    fn drop(&mut self) {
        if self.outermost {
            LINE.set(None);
        }
    }
}

/// Runs `f` with `name` appended to the scope of what it records, so that errors and traces name the layer.
pub fn scope<T>(name: &str, f: impl FnOnce() -> T) -> T {
    let _scope = Scope::enter(name);
    f()
}

/// Names the method that the user called, for messages about the operations it is made of, until the guard is dropped.
/// Inside another method it does nothing: the user called that one.
pub fn method(name: &'static str) -> MethodGuard {
    let outermost = METHOD.get().is_empty();
    if outermost {
        METHOD.set(name);
    }
    MethodGuard { outermost, thread: PhantomData }
}

/// Ends what [`method`] began when it is dropped.
#[must_use = "the name ends when the guard is dropped"]
pub struct MethodGuard {
    outermost: bool,
    /// It belongs to its thread.
    thread: PhantomData<*const ()>,
}

impl Drop for MethodGuard {
    fn drop(&mut self) {
        if self.outermost {
            METHOD.set("");
        }
    }
}
