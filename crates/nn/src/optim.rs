//! Optimisers. A step replaces each parameter that has a gradient by a new leaf; state is kept by path.

use crate::Module;
use kiln_tensor::{Gradients, Tensor, no_grad};
use std::collections::HashMap;

/// Something that improves a model by its gradients.
pub trait Optimizer {
    /// The parameter at `path` after a step along `gradient`.
    fn update(&mut self, path: &str, parameter: &Tensor, gradient: &Tensor) -> Tensor;

    /// Called once before the parameters of a step are updated.
    fn begin(&mut self) {}

    /// Updates every parameter of `model` that has a gradient, and ends the step for its device.
    fn step(&mut self, model: &mut dyn Module, gradients: &Gradients) {
        self.begin();
        let mut devices = Vec::new();
        no_grad(|| {
            model.visit_mut("", &mut |path, parameter| {
                if let Some(gradient) = gradients.get(parameter) {
                    let device = parameter.device();
                    *parameter = self.update(path, &parameter.detach(), gradient).requires_grad();
                    if !devices.contains(&device) {
                        devices.push(device);
                    }
                }
            });
        });
        devices.iter().for_each(|device| device.mark());
    }
}

/// Stochastic gradient descent, with momentum and weight decay.
pub struct Sgd {
    /// Learning rate.
    pub rate: f64,
    /// How much of the last velocity stays; 0 for none.
    pub momentum: f64,
    /// Added to the gradient: this times the parameter.
    pub decay: f64,
    velocity: HashMap<String, Tensor>,
}

impl Sgd {
    /// Plain descent.
    pub fn new(rate: f64) -> Sgd {
        Sgd { rate, momentum: 0.0, decay: 0.0, velocity: HashMap::new() }
    }

    /// With momentum.
    pub fn momentum(mut self, momentum: f64) -> Sgd {
        self.momentum = momentum;
        self
    }

    /// With weight decay.
    pub fn decay(mut self, decay: f64) -> Sgd {
        self.decay = decay;
        self
    }
}

impl Optimizer for Sgd {
    fn update(&mut self, path: &str, parameter: &Tensor, gradient: &Tensor) -> Tensor {
        let mut direction = gradient.clone();
        if self.decay != 0.0 {
            direction = direction + parameter * self.decay;
        }
        if self.momentum != 0.0 {
            if let Some(velocity) = self.velocity.get(path) {
                direction = velocity * self.momentum + direction;
            }
            self.velocity.insert(path.to_string(), direction.clone());
        }
        parameter - direction * self.rate
    }
}

/// Adam, with decoupled weight decay.
pub struct Adam {
    /// Learning rate.
    pub rate: f64,
    /// Decay of the running mean and of the running mean square.
    pub betas: (f64, f64),
    /// Added to the root.
    pub eps: f64,
    /// The share of a parameter that each step takes away, times the rate.
    pub decay: f64,
    steps: i32,
    moments: HashMap<String, (Tensor, Tensor)>,
}

impl Adam {
    /// Adam with the usual constants.
    pub fn new(rate: f64) -> Adam {
        Adam { rate, betas: (0.9, 0.999), eps: 1e-8, decay: 0.0, steps: 0, moments: HashMap::new() }
    }

    /// With decoupled weight decay.
    pub fn decay(mut self, decay: f64) -> Adam {
        self.decay = decay;
        self
    }
}

impl Optimizer for Adam {
    fn begin(&mut self) {
        self.steps += 1;
    }

    fn update(&mut self, path: &str, parameter: &Tensor, gradient: &Tensor) -> Tensor {
        let (b1, b2) = self.betas;
        let (mean, square) = match self.moments.remove(path) {
            Some((mean, square)) => {
                (mean * b1 + gradient * (1.0 - b1), square * b2 + gradient.square() * (1.0 - b2))
            }
            None => (gradient * (1.0 - b1), gradient.square() * (1.0 - b2)),
        };
        let (c1, c2) = (1.0 - b1.powi(self.steps), 1.0 - b2.powi(self.steps));
        let change = &mean / c1 / ((&square / c2).sqrt() + self.eps) * self.rate;
        self.moments.insert(path.to_string(), (mean, square));
        let kept =
            if self.decay == 0.0 { parameter.clone() } else { parameter * (1.0 - self.rate * self.decay) };
        kept - change
    }
}
