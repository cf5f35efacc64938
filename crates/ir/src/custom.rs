//! Custom operations: a registry entry carries a user's operation through recording, autodiff, text, wire and every
//! device that can run host code. The entry is found by name; registering it on both sides of a wire makes it work there.

use crate::{Meta, OpError, V};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, RwLock};

/// What Kiln needs to know of a user's operation.
pub trait CustomOp: Send + Sync + 'static {
    /// Its name; a prefix such as `mylib.` keeps names apart.
    fn name(&self) -> &str;

    /// How many values it gives.
    fn outputs(&self) -> usize {
        1
    }

    /// Dtypes and shapes of its results, or why it cannot be applied. Must not panic, whatever it is given.
    fn infer(&self, attrs: &[u8], ins: &[Meta]) -> Result<SmallVec<[Meta; 2]>, OpError>;

    /// Its results, computed on the host. Operands are row-major bytes; each result is a zeroed buffer to fill. Not
    /// called where [`CustomOp::lower`] gives them.
    fn eval(&self, attrs: &[u8], ins: &[(Meta, &[u8])], outs: &mut [(Meta, &mut [u8])])
    -> Result<(), String>;

    /// The gradient of operand `i` from the gradients of the results (missing where a result is unused), or `None` if
    /// it has none.
    fn grad<'a>(
        &self,
        _attrs: &[u8],
        _grads: &[Option<V<'a>>],
        _ins: &[V<'a>],
        _outs: &[V<'a>],
        _i: usize,
    ) -> Option<V<'a>> {
        None
    }

    /// Its results as built-in operations. Where there are some, and the operation is pure, they are what it means on
    /// every device: they fuse with what is around them, and run where host code cannot. What comes out may depend on the
    /// attributes and on the dtypes and shapes of the operands, and on nothing else.
    fn lower<'a>(&self, _attrs: &[u8], _ins: &[V<'a>]) -> Option<SmallVec<[V<'a>; 2]>> {
        None
    }

    /// Whether its results depend on its operands and attributes alone.
    fn pure(&self) -> bool {
        true
    }
}

static REGISTRY: LazyLock<RwLock<HashMap<String, Arc<dyn CustomOp>>>> = LazyLock::new(RwLock::default);

/// The name is taken by another registered or built-in operation.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("an operation named `{name}` exists already")]
pub struct NameTaken {
    /// The name.
    pub name: String,
}

/// Makes an operation known for the life of the process.
pub fn register(op: impl CustomOp) -> Result<(), NameTaken> {
    let name = op.name().to_string();
    let mut registry = REGISTRY.write().unwrap_or_else(|e| e.into_inner());
    if registry.contains_key(&name) || crate::Op::names().contains(&name.as_str()) {
        return Err(NameTaken { name });
    }
    registry.insert(name, Arc::new(op));
    Ok(())
}

/// Whether an operation may stand for built-in ones: it is known and pure.
pub fn may_lower(call: &crate::CustomCall) -> bool {
    find(&call.name).is_some_and(|op| op.pure())
}

/// The operation registered under `name`.
pub fn find(name: &str) -> Option<Arc<dyn CustomOp>> {
    REGISTRY.read().unwrap_or_else(|e| e.into_inner()).get(name).cloned()
}
